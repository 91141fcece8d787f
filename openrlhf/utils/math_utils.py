"""Answers to mathematical questions, under the path that users' files import."""

from openrlhf.agents.math_answers import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
