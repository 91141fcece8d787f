"""Extraction and grading of mathematical answers, re-exported under the path that reward files import."""

from openrlhf.agents.math_answers import extract_boxed_answer as extract_boxed_answer
from openrlhf.agents.math_answers import grade_answer as grade_answer
