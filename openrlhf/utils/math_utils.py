"""Extraction and grading of mathematical answers, re-exported under the path that reward files import."""

from openrlhf.agents.math_answers import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
