"""The import paths that users' files know from upstream."""

from openrlhf.agents.math_answers import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
