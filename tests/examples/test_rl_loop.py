"""The RL loop in one file, run as a reader runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "rl_loop.py"
WATCHDOG = 300  # seconds; it takes twenty on two idle cores


@pytest.mark.slow(seconds=14)
def test_held_out_accuracy_rises_by_thirty_points(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "25"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )
    assert done.returncode == 0, done.stderr
    before, after = (float(value) for value in re.findall(r"held-out accuracy .* ([\d.]+)%", done.stdout))
    assert before < 50  # 11.0 to 27.5 over five seeds
    assert after >= before + 30, done.stdout  # by 71 to 87 points


def test_it_is_short_and_uses_the_objects_of_the_trainer():
    source = SCRIPT.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 250
    used = set(re.findall(r"^from openrlhf\.(\w+)", source, re.MULTILINE))
    assert used >= {"algo", "models", "rl", "rollout", "training", "types"}
