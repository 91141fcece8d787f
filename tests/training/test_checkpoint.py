"""A checkpoint appears complete or not at all, the newest intact one is resumed from, and rotation deletes old ones."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from openrlhf.errors import BackendError
from openrlhf.training.atomic_folder import exporting, remove_leftovers, writing
from openrlhf.training.checkpoint import (
    GIB,
    is_checkpoint_name,
    newest,
    point_latest,
    read_state,
    rotate,
    step_folder,
    write_state,
)
from tests.commands import ROOT

RUN = "this run"


def save(root, step, *, run=RUN, content="x", hf=False):
    """Write a finished checkpoint of a step."""
    folder = step_folder(root, step)
    with writing(folder) as temporary:
        write_files(temporary, step, content, run)
    point_latest(root, step)
    if hf:
        with exporting(folder.with_name(f"{folder.name}_hf")) as temporary:
            (temporary / "config.json").write_text("{}")
            (temporary / "model.safetensors").write_text(content)
    return folder


def write_files(temporary, step, content="x", run=RUN):
    (temporary / "weights").write_text(content)
    write_state(temporary, {"step": step, "run": run})


def rotate_after(root, step, *, keep=9, max_gib=float("inf")):
    rotate(root, step=step, run=RUN, keep=keep, max_gib=max_gib)


def list_names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_complete_or_not_at_all(tmp_path):
    folder = save(tmp_path, 3)
    assert list_names(tmp_path) == ["global_step3", "latest"]
    assert list_names(folder) == ["manifest.json", "state.json", "weights"]
    assert read_state(folder) == {"step": 3, "run": RUN}
    assert newest(tmp_path) == folder


def test_a_crash_while_writing_keeps_the_older_checkpoint(tmp_path):
    older = save(tmp_path, 3)

    def write_and_crash():
        with writing(step_folder(tmp_path, 6)) as temporary:
            write_files(temporary, 6)
            raise KeyboardInterrupt

    for _ in range(2):  # the second attempt finds the remains of the first
        with pytest.raises(KeyboardInterrupt):
            write_and_crash()
        assert not step_folder(tmp_path, 6).exists()
        assert newest(tmp_path) == older
    assert newest(tmp_path) == older
    assert save(tmp_path, 6) == newest(tmp_path)
    assert list_names(tmp_path) == ["global_step3", "global_step6", "latest"]


def test_writing_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3, content="old")
    folder = save(tmp_path, 3, content="new")
    assert (folder / "weights").read_text() == "new"
    assert list_names(tmp_path) == ["global_step3", "latest"]


def test_two_writers_never_share_a_temporary_folder(tmp_path):
    with writing(step_folder(tmp_path, 1)) as one, writing(step_folder(tmp_path, 1)) as other:
        assert one != other
        for temporary in (one, other):
            write_files(temporary, 1)
    assert list_names(tmp_path) == ["global_step1"]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None


def test_latest_may_name_a_deleted_checkpoint(tmp_path):
    older = save(tmp_path, 9)
    save(tmp_path, 10)
    point_latest(tmp_path, 11)
    assert newest(tmp_path) == tmp_path / "global_step10"  # ordered by number, not alphabetically
    (tmp_path / "global_step10" / "state.json").unlink()
    assert newest(tmp_path) == older


def test_latest_wins_over_the_highest_number(tmp_path):
    save(tmp_path, 100)
    fresh = save(tmp_path, 2)
    assert newest(tmp_path) == fresh


def test_other_folders_are_not_checkpoints(tmp_path):
    (tmp_path / "global_step_best").mkdir()
    (tmp_path / "global_step5_hf").mkdir()
    assert newest(tmp_path) is None


def test_rotation_limits_the_number_of_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, hf=True)
    rotate_after(tmp_path, 4, keep=2)
    assert list_names(tmp_path) == ["global_step3", "global_step3_hf", "global_step4", "global_step4_hf", "latest"]
    rotate_after(tmp_path, 4, keep=2)
    assert len(list_names(tmp_path)) == 5


def test_rotation_by_size_counts_model_folders(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, content=10000 * "x", hf=True)
    rotate_after(tmp_path, 3, max_gib=65000 / GIB)
    assert len(list_names(tmp_path)) == 7
    rotate_after(tmp_path, 3, max_gib=45000 / GIB)
    assert list_names(tmp_path) == ["global_step2", "global_step2_hf", "global_step3", "global_step3_hf", "latest"]


def test_rotation_works_for_model_folders_without_checkpoints(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"global_step{step}_hf").mkdir()
    rotate_after(tmp_path, 3, keep=1)
    assert list_names(tmp_path) == ["global_step3_hf"]


def test_rotation_never_deletes_the_newest(tmp_path):
    save(tmp_path, 7)
    rotate_after(tmp_path, 7, keep=0, max_gib=0)
    assert newest(tmp_path) == tmp_path / "global_step7"


def test_rotation_deletes_an_earlier_runs_checkpoints_with_higher_steps(tmp_path):
    save(tmp_path, 100, run="another run")
    save(tmp_path, 5)
    rotate_after(tmp_path, 5, keep=1)
    assert list_names(tmp_path) == ["global_step5", "latest"]


def test_rotation_does_not_trust_the_clock(tmp_path):
    for step in (1, 2, 3):
        os.utime(save(tmp_path, step), (1e9 - step, 1e9 - step))  # the clock was set back before each
    rotate_after(tmp_path, 3, keep=2)
    assert list_names(tmp_path) == ["global_step2", "global_step3", "latest"]


def test_rotation_never_deletes_the_checkpoint_that_latest_names(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    point_latest(tmp_path, 1)  # the next two could not be named, because the disk was full
    rotate_after(tmp_path, 3, keep=1)
    assert list_names(tmp_path) == ["global_step1", "global_step3", "latest"]


def test_rotation_deletes_steps_that_the_run_will_write_again(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 3)  # after a resume from step 2
    rotate_after(tmp_path, 3, keep=2)
    assert list_names(tmp_path) == ["global_step2", "global_step3", "latest"]


def test_rotation_keeps_other_files(tmp_path):
    (tmp_path / "global_step_best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2):
        save(tmp_path, step)
    rotate_after(tmp_path, 2, keep=1)
    assert list_names(tmp_path) == ["global_step2", "global_step_best", "latest", "notes.txt"]


def test_a_text_file_appears_complete_or_not_at_all(tmp_path):
    point_latest(tmp_path, 1)
    point_latest(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert list_names(tmp_path) == ["latest"]


def test_a_broken_state_file_gives_one_line(tmp_path):
    (tmp_path / "state.json").write_text("{")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BackendError, match=f"the checkpoint {folder} cannot be read: ") as caught:
            read_state(folder)
        assert "\n" not in str(caught.value)


DAMAGES = {
    "a flipped bit": (
        lambda folder: (folder / "weights").write_bytes(b"y"),
        "weights does not match its checksum",
    ),
    "truncated": (lambda folder: os.truncate(folder / "weights", 0), "weights has 0 bytes instead of 1"),
    "a missing file": (lambda folder: (folder / "weights").unlink(), "weights is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "a bad manifest": (lambda folder: (folder / "manifest.json").write_bytes(b"{\xff"), "manifest.json cannot be read"),
    "a bad state": (lambda folder: (folder / "state.json").write_bytes(b"\xff"), "state.json is missing or cannot"),
    "a state of zeros": (lambda folder: (folder / "state.json").write_bytes(b"\0" * 40), "state.json is missing or"),
    "an emptied folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "state.json is missing or"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, tmp_path, capsys):
    for step in (2, 4, 6):
        save(tmp_path, step)
    do, reason = DAMAGES[damage]
    do(tmp_path / "global_step6")
    assert newest(tmp_path) == tmp_path / "global_step4"
    line = capsys.readouterr().err
    assert f"damaged checkpoint in {tmp_path}: global_step6: {reason}" in line
    assert line.endswith("global_step4 is used instead\n")
    assert line.count("\n") == 1


def test_a_run_never_starts_over_because_its_checkpoints_are_damaged(tmp_path):
    for step in (2, 4):
        (save(tmp_path, step) / "weights").write_text("bad")
    with pytest.raises(BackendError, match=r"no checkpoint in .* is intact: global_step4: weights has 3 bytes"):
        newest(tmp_path)


def test_another_runs_checkpoint_does_not_replace_a_damaged_one(tmp_path):
    save(tmp_path, 3, run="another run")
    save(tmp_path, 2)
    (save(tmp_path, 4) / "weights").unlink()
    assert newest(tmp_path) == tmp_path / "global_step2"


@pytest.mark.parametrize("name", ["../elsewhere", "global_step5/../../elsewhere", "global_step1\n2", "", "/etc"])
def test_latest_cannot_lead_out_of_the_folder(name, tmp_path, capsys):
    outside = save(tmp_path / "elsewhere", 5)
    shutil.copytree(outside, tmp_path / "elsewhere", dirs_exist_ok=True)
    inside = save(tmp_path / "ckpt", 5)
    (tmp_path / "ckpt" / "latest").write_text(name)
    assert newest(tmp_path / "ckpt") == inside
    assert "latest is ignored: expected a name like global_step20, got" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_version_loads_with_a_message(tmp_path, capsys):
    folder = step_folder(tmp_path, 3)
    folder.mkdir()
    write_state(folder, {"step": 3})
    assert newest(tmp_path) == folder
    assert "older version, without checksums: it is not verified" in capsys.readouterr().err


def test_other_users_cannot_write_a_checkpoint(tmp_path):
    before = os.umask(0)
    try:
        folder = save(tmp_path, 3)
    finally:
        os.umask(before)
    assert [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o022] == []


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from openrlhf.training.atomic_folder import writing
from openrlhf.training.checkpoint import point_latest, rotate, step_folder, write_state

root, last, count = Path(sys.argv[1]), int(sys.argv[2]), 0
CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "shutil.rmtree")


def kill_at_last(event, arguments):
    global count
    if event in CHANGES and str(root) in str(arguments[0]):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill_at_last)
for step in (4, 4, 6):  # one folder is replaced, and one rotated away
    with writing(step_folder(root, step)) as aside:
        (aside / "weights").write_text("w" * 100)
        write_state(aside, {"step": step, "run": "this run"})
    point_latest(root, step)
    rotate(root, step=step, run="this run", keep=2, max_gib=1.0)
"""


@pytest.mark.slow(seconds=6)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_and_no_remains(tmp_path, capsys):
    """Kill a writer at each of its file operations in turn, until it finishes."""
    original = save(tmp_path / "original", 2, content="w" * 100)
    shutil.copytree(original.parent, tmp_path / "whole")
    for last in range(1, 1000):
        root = tmp_path / "killed"
        shutil.copytree(tmp_path / "whole", root)
        done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(root), str(last)], cwd=ROOT, check=False)
        remove_leftovers(root, is_checkpoint_name)
        assert [name for name in list_names(root) if not re.fullmatch(r"global_step\d|latest", name)] == []
        found = newest(root)
        assert (found / "weights").read_text() == "w" * 100
        assert capsys.readouterr().err == ""  # nothing was damaged, so nothing was reported
        shutil.rmtree(root)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert last > 50
    assert found.name == "global_step6"
