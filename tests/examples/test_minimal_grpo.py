"""The whole idea on one page, run as a reader runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"
WATCHDOG = 300  # seconds; on two idle cores it takes ten


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
    assert before < 50  # 12 to 22 over five seeds
    assert after >= before + 30, done.stdout  # by 78 to 88 points


def test_it_stays_on_one_page_and_uses_nothing_but_the_mathematics():
    source = SCRIPT.read_text()
    assert len(source.splitlines()) <= 250
    assert set(re.findall(r"(?:from|import) openrlhf\.?(\w*)", source)) == {"algo"}
