"""Compiled code is only read from folders that other users cannot write to, because PyTorch executes it."""

import os
import tempfile

import pytest

from openrlhf.models.compiler_cache import VARIABLE, compiler_cache
from openrlhf.training.processes import choose_device


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """PyTorch's folder for this user, in a temporary folder of this test."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "torchinductor_alice"


def test_the_usual_folder_is_created_and_used_again(usual):
    assert [compiler_cache(), compiler_cache()] == [str(usual)] * 2
    assert usual.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("taken", ["world", "group", "link", "file", "other user"])
def test_a_folder_that_others_can_write_is_not_used(taken, usual, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    match taken:
        case "link":
            usual.symlink_to(elsewhere)
        case "file":
            usual.touch()
        case _:
            usual.mkdir()
            usual.chmod({"world": 0o777, "group": 0o775}.get(taken, 0o755))
    if taken == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: usual.stat().st_uid + 1)
    monkeypatch.setenv(VARIABLE, str(usual))  # as set by PyTorch, if it was asked before
    choose_device("cpu")
    assert os.environ[VARIABLE] == str(tmp_path / "home/.cache/openrlhf/torchinductor")


def test_a_folder_that_the_user_named_is_used(usual, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert compiler_cache() == str(tmp_path)
