"""The short version of `make drill`: a few kills, a damaged checkpoint, a few bad inputs; and checks of the drills."""

import random
import sys

import pytest

from tools.drill import programs
from tools.drill.bad_inputs import drill_bad_inputs
from tools.drill.damage import drill_damage, drill_disks, flip_bit
from tools.drill.local_kills import drill_local_kills
from tools.drill.long_runs import drill_many_prompts
from tools.drill.outcome import Lost, Outcome, render_table, try_all

SEED = 0


@pytest.mark.slow(seconds=15)
def test_killed_runs_resume_to_the_uninterrupted_result(tmp_path):
    outcome = drill_local_kills(tmp_path, count=4, seed=SEED, at_a_time=1, shared_memory=False)
    assert (outcome.tried, outcome.losses) == (4, [])


@pytest.mark.slow(seconds=5)
def test_a_run_never_trains_on_a_truncated_checkpoint(tmp_path):
    outcome = drill_damage(tmp_path, SEED, limit=1, ways=["truncated"], at_a_time=1)
    assert (outcome.tried, outcome.losses) == (1, [])


@pytest.mark.slow(seconds=5)
def test_bad_inputs_give_one_line_and_leave_no_files(tmp_path):
    outcome = drill_bad_inputs(tmp_path, SEED, limit=4, at_a_time=1)
    assert (outcome.tried, outcome.losses) == (4, [])


@pytest.mark.slow(seconds=8)
def test_prompts_with_failing_rewards_are_skipped_and_the_others_trained_once(tmp_path):
    outcome = drill_many_prompts(tmp_path, 1000, SEED)
    assert (outcome.tried, outcome.losses) == (1000, [])


@pytest.mark.slow(seconds=8)
def test_a_trained_model_survives_full_disks(tmp_path):
    outcome = drill_disks(tmp_path, at_a_time=1)
    assert outcome.tried > 0
    assert outcome.losses == []


def test_a_case_that_fails_is_lost_with_its_reason():
    def drill(case):
        if case == 2:
            raise Lost("the metrics differ")
        if case == 3:
            raise ValueError("three")

    outcome = try_all({"one": 1, "two": 2, "three": 3}, drill, at_a_time=2)
    assert outcome == Outcome(3, ["two: the metrics differ", "three: ValueError: three"])
    assert (outcome.survived, outcome.lost) == (1, 2)


def test_the_table_has_a_row_per_drill_and_their_sum():
    table = render_table([("kills", Outcome(3, ["one"]), 60.0), ("disks", Outcome(4), 30.0)])
    assert table.splitlines()[2:] == [
        "| kills | 3 | 2 | 1 | 1.0 |",
        "| disks | 4 | 4 | 0 | 0.5 |",
        "| **all** | 7 | 6 | 1 | 1.5 |",
    ]


def test_a_process_that_outlives_its_run_is_found_and_ended(tmp_path):
    process = programs.start(tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(Lost, match=r"1 processes are left 0\.2 s after the kill"):
        programs.must_end(tmp_path, 0.2)
    assert process.wait(60) == -9
    programs.must_end(tmp_path, 0.2)


def test_leftover_files_are_found(tmp_path):
    process = programs.start(tmp_path, [sys.executable, "-c", "import tempfile; tempfile.mkdtemp(prefix='mine')"])
    programs.finish(process, tmp_path)
    with pytest.raises(Lost, match=r"left behind: .*/tmp/mine"):
        programs.must_leave_no_files(tmp_path, None)
    programs.must_leave_no_files(tmp_path, None, ("mine",))
    (tmp_path / ".model.writing").mkdir()
    with pytest.raises(Lost, match="writing"):
        programs.must_leave_no_files(tmp_path, None, ("mine",))


def test_one_bit_is_flipped(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    flip_bit(tmp_path / "file", random.Random(SEED))
    assert sum(byte.bit_count() for byte in (tmp_path / "file").read_bytes()) == 1
