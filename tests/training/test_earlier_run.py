"""The record of an earlier run is moved aside, whole, and never deleted."""

import json
import signal
import subprocess
import sys

import pytest

from openrlhf.errors import DiskError
from openrlhf.training.earlier_run import set_earlier_run_aside
from tests.commands import ROOT


def lines(*steps):
    return "".join(json.dumps({"kind": "train", "step": step, "loss": 0.5}) + "\n" for step in steps)


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run of three steps; rollouts/ also has another file."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text(lines(1, 2, 3))
    (tmp_path / "config.json").write_text("{}")
    for step in (1, 2, 3, 1000000):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(f"step {step}")
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    return tmp_path


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_plain_start_moves_everything(run_dir, capsys):
    before = files(run_dir)
    set_earlier_run_aside(run_dir)
    (aside,) = (run_dir / "earlier").iterdir()
    assert capsys.readouterr().err == f"openrlhf: the record of an earlier run is now in {aside}\n"
    notes = before.pop("rollouts/notes.txt")
    assert files(aside) == before
    left = {name: text for name, text in files(run_dir).items() if not name.startswith("earlier")}
    assert left == {"config.json": "{}", "rollouts/notes.txt": notes}  # the config will be replaced

    (run_dir / "metrics.jsonl").write_text(lines(1))
    set_earlier_run_aside(run_dir)  # in the same second
    assert sorted(path.name for path in (run_dir / "earlier").iterdir()) == [aside.name, f"{aside.name}_2"]


def test_unfinished_files_of_a_killed_run_are_removed(run_dir):
    unfinished = [
        ".config.json.writing-0a1b",
        ".metrics.jsonl.writing-0a1b",
        "rollouts/.step_000004.jsonl.writing-0a1b",
    ]
    for name in unfinished:
        (run_dir / name).write_text('{"st')
    set_earlier_run_aside(run_dir, resumed_at=3)
    assert not files(run_dir).keys() & set(unfinished)


def test_a_resumed_run_keeps_the_steps_up_to_its_checkpoint(run_dir, capsys):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"no": "step"}\n{"kind": "train", "st')  # a damaged disk, then a crash
    set_earlier_run_aside(run_dir, resumed_at=2)
    (aside,) = (run_dir / "earlier").iterdir()
    assert f"the record of steps after 2 is now in {aside}" in capsys.readouterr().err
    assert (run_dir / "metrics.jsonl").read_text() == lines(1, 2)
    dropped = lines(3).encode() + b'\xff\xfe\n{"no": "step"}\n{"kind": "train", "st'
    assert (aside / "metrics.jsonl").read_bytes() == dropped
    assert sorted(path.name for path in (aside / "rollouts").iterdir()) == ["step_000003.jsonl", "step_1000000.jsonl"]
    kept = ["notes.txt", "step_000001.jsonl", "step_000002.jsonl"]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == kept


def test_nothing_to_move_is_not_mentioned(run_dir, tmp_path, capsys):
    set_earlier_run_aside(tmp_path / "new")
    set_earlier_run_aside(run_dir, resumed_at=1000000)
    assert not (run_dir / "earlier").exists()
    assert capsys.readouterr().err == ""


def test_a_disk_without_room_changes_nothing(run_dir, file_size_limit):
    before = files(run_dir)
    with file_size_limit(20), pytest.raises(DiskError, match=r"--run_dir .* cannot be written: File too large"):
        set_earlier_run_aside(run_dir, resumed_at=2)
    assert (run_dir / "metrics.jsonl").read_text() == before["metrics.jsonl"]
    everything = "".join(files(run_dir).values())
    assert all(f"step {step}" in everything for step in (1, 2, 3, 1000000))


KILLED = """
import os, signal, sys
from pathlib import Path
from openrlhf.training.earlier_run import set_earlier_run_aside

run_dir, resumed_at, last, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 0


def kill_at_last(event, arguments):
    global count
    if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(run_dir) in str(arguments[0]):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill_at_last)
set_earlier_run_aside(run_dir, resumed_at)
"""


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("resumed_at", [0, 2])
def test_a_kill_at_any_moment_loses_nothing(resumed_at, run_dir, capsys):
    original = files(run_dir)
    for last in range(1, 1000):
        for name, text in original.items():
            (run_dir / name).write_text(text)
        words = [sys.executable, "-c", KILLED, str(run_dir), str(resumed_at), str(last)]
        done = subprocess.run(words, cwd=ROOT, check=False, stderr=subprocess.DEVNULL)
        set_earlier_run_aside(run_dir, resumed_at)  # the next start
        left = files(run_dir)
        for name, text in original.items():
            for line in text.splitlines():
                assert any(line in content for where, content in left.items() if where.endswith(name.split("/")[-1]))
        assert left.get("metrics.jsonl", "") == (lines(1, 2) if resumed_at else "")
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert last > 5
