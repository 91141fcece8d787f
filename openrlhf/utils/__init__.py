"""Import paths of upstream OpenRLHF, kept for existing reward and agent files.

These modules only re-export names; the implementations are in `openrlhf.agents`.
"""

from openrlhf.agents.math_answers import extract_boxed_answer as extract_boxed_answer
from openrlhf.agents.math_answers import grade_answer as grade_answer
