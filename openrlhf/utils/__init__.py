"""Import paths of upstream OpenRLHF, kept for existing reward and agent files.

These modules only re-export names; the implementations are in `openrlhf.agents`.
"""

from openrlhf.agents.math_answers import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
