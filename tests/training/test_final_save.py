"""A finished model is saved somewhere, even if the disk of --save_path fails."""

import errno
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf.errors import DiskError
from openrlhf.training import final_save
from openrlhf.training.atomic_folder import Ranks
from openrlhf.training.final_save import FinalSave


@pytest.fixture(autouse=True)
def short_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(final_save, "PAUSE", 0.0)
    monkeypatch.setattr(final_save, "RETRIES", 3)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def save(tmp_path, fails):
    """Save a model; `fails(aside, attempt)` tells whether the disk of an attempt is full."""
    saving = FinalSave(tmp_path / "out", tmp_path / "ckpt" / "model")
    tried = []
    for attempt in saving.attempts():
        with attempt as aside:
            tried.append(aside)
            (aside / "config.json").write_text("{}")
            if fails(aside, len(tried)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return saving, tried


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_model_is_saved_in_its_folder(tmp_path, capsys):
    saving, tried = save(tmp_path, lambda aside, attempt: False)
    saving.must_be_in_place()
    assert (len(tried), names(tmp_path)) == (1, ["out/config.json"])
    assert capsys.readouterr().err == ""


def test_on_a_full_disk_the_model_is_saved_with_the_checkpoints(tmp_path, capsys):
    saving, _ = save(tmp_path, lambda aside, attempt: aside.parent == tmp_path)
    assert names(tmp_path) == ["ckpt/model/config.json"]
    assert "could not be saved in" in capsys.readouterr().err
    with pytest.raises(DiskError, match=r"the trained model is in .*ckpt/model. Try: cp -r .*ckpt/model/. .*out"):
        saving.must_be_in_place()


def test_the_temporary_folder_comes_next(tmp_path):
    saving, _ = save(tmp_path, lambda aside, attempt: aside.parent != tmp_path and "tmp/openrlhf-" not in str(aside))
    assert saving.saved == tmp_path / "out"
    saving, _ = save(tmp_path, lambda aside, attempt: "tmp/openrlhf-" not in str(aside))
    assert saving.saved.parent.parent == tmp_path / "tmp"
    assert (saving.saved / "config.json").exists()


def test_a_run_waits_for_room(tmp_path, capsys):
    saving, tried = save(tmp_path, lambda aside, attempt: attempt < 5)
    saving.must_be_in_place()
    assert len(tried) == 5
    assert names(tmp_path) == ["out/config.json"]
    assert "could not be saved anywhere: No space left on device. Make room for it in" in capsys.readouterr().err


def test_the_wait_is_limited(tmp_path):
    with pytest.raises(DiskError, match=r"the trained model could not be saved in .*: No space left on device"):
        save(tmp_path, lambda aside, attempt: True)
    assert names(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_folder_that_cannot_be_created_is_a_failed_attempt(tmp_path, monkeypatch):
    begin = final_save.begin_export

    def refuse(folder, ranks):
        if folder == tmp_path / "out":
            raise DiskError(os.strerror(errno.EROFS))
        return begin(folder, ranks)

    monkeypatch.setattr(final_save, "begin_export", refuse)
    saving, tried = save(tmp_path, lambda aside, attempt: False)
    assert saving.saved == tmp_path / "ckpt" / "model"
    assert len(tried) == 1


class ThreadRank(Ranks):
    """One of two ranks, on a thread; `agree` is a collective call, as in a process group."""

    num_processes = 2

    def __init__(self, process, barrier, shared):
        self.process, self.meet, self.shared = process, barrier, shared

    def barrier(self):
        self.meet.wait(60)

    def agree(self, number):
        if self.process == 0:
            self.shared["number"] = number
        self.meet.wait(60)
        found = self.shared["number"]
        self.meet.wait(60)
        return found


def test_all_ranks_make_the_same_attempts(tmp_path):
    """Only process 0 writes and fails; the others must follow it to the next place."""
    meet, shared = threading.Barrier(2), {}

    def save_in(process):
        saving = FinalSave(tmp_path / "out", tmp_path / "ckpt" / "model", ThreadRank(process, meet, shared))
        attempts = 0
        for attempt in saving.attempts():
            with attempt as aside:
                attempts += 1
                if process == 0:
                    (aside / "config.json").write_text("{}")
                    if attempts == 1:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return attempts, saving.saved

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(save_in, (0, 1))) == [(2, tmp_path / "ckpt" / "model")] * 2
    assert names(tmp_path) == ["ckpt/model/config.json"]


def test_files_that_another_machine_wrote_to_its_own_disk_do_not_count(tmp_path):
    saving = FinalSave(tmp_path / "out", tmp_path / "ckpt" / "model")
    for attempt in saving.attempts():
        with attempt as aside:
            (aside / "tokenizer.json").write_text("{}")
            if aside.parent == tmp_path / "ckpt":
                (aside / "config.json").write_text("{}")
    assert saving.saved == tmp_path / "ckpt" / "model"


def test_other_errors_are_not_disk_errors(tmp_path):
    saving = FinalSave(tmp_path / "out", tmp_path / "model")

    def fail():
        for attempt in saving.attempts():
            with attempt:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []
