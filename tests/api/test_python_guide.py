"""The code in docs/python.md, run from top to bottom."""

import re
from pathlib import Path

import pytest

from openrlhf import StepRecord

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow(seconds=3)
def test_the_guide_runs_from_top_to_bottom(models):
    Path("model").symlink_to(models())
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    space = {}
    for block in blocks:
        exec(block, space)
    assert len(blocks) == 5
    assert (space["steps"], len(space["rewards"]), len(space["answers"])) == ([1], 1, 1)
    with pytest.raises(space["StopTraining"], match="solved"):
        space["stop_when_solved"](StepRecord("train", 1, {"reward": 1.0}))
