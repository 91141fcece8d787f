"""Two runs never share a folder, and a lock ends with the process that holds it."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from openrlhf.errors import ConfigError
from openrlhf.training.folder_lock import LOCK_FILE, hold_folder, hold_folders
from tests.commands import ROOT

HOLDER = """
import os, sys, time
from pathlib import Path
from openrlhf.training.folder_lock import hold_folder

with hold_folder(Path(sys.argv[1]), "--ckpt_path"):
    wait, ready = os.pipe()
    if "fork" in sys.argv:
        if os.fork() == 0:
            os.write(ready, b"1")  # it has closed what it inherited
            time.sleep(600)  # a child that outlives its parent
        os.read(wait, 1)
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Return a function that starts a process that holds a folder."""
    started = []

    def start(folder, *more):
        words = [sys.executable, "-c", HOLDER, str(folder), *more]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_second_process_is_refused_with_host_and_pid_of_the_first(tmp_path, holder):
    process = holder(tmp_path)
    with pytest.raises(ConfigError) as caught, hold_folder(tmp_path, "--ckpt_path"):
        pass
    message = str(caught.value)
    holds = f"process {process.pid} on host {socket.gethostname()} ("
    assert f"--ckpt_path {tmp_path} is in use by another run: {holds}" in message
    assert message.endswith("Try: another --ckpt_path, or wait until that run ends")


def test_a_second_run_in_the_same_process_is_refused(tmp_path):
    with (
        hold_folder(tmp_path, "--run_dir"),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on host"),
        hold_folder(tmp_path, "--run_dir"),
    ):
        pass


@pytest.mark.parametrize("more", [(), ("fork",)], ids=["alone", "with a forked child"])
def test_a_killed_process_holds_nothing(more, tmp_path, holder):
    process = holder(tmp_path, *more)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()  # a file without a holder
    with hold_folder(tmp_path, "--ckpt_path"):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_leaves_nothing_behind(tmp_path):
    with hold_folder(tmp_path / "a" / "b", "--run_dir"):
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_folder(tmp_path / "a" / "b", "--run_dir"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


def test_a_file_that_the_last_holder_removed_is_not_locked(tmp_path, monkeypatch):
    """The holder ends between our opening the file and our locking it: another process may have made a new one."""
    first = hold_folder(tmp_path, "--run_dir")
    first.__enter__()
    opened = os.open

    def end_the_holder(*arguments):
        descriptor = opened(*arguments)
        monkeypatch.undo()
        first.__exit__(None, None, None)
        return descriptor

    monkeypatch.setattr(os, "open", end_the_holder)
    with hold_folder(tmp_path, "--run_dir"), pytest.raises(ConfigError), hold_folder(tmp_path, "--run_dir"):
        pass


def test_flags_may_name_the_same_folder(tmp_path):
    folders = {"--save_path": tmp_path / "x", "--run_dir": tmp_path / "y" / ".." / "x"}
    (tmp_path / "y").mkdir()
    with hold_folders(folders):
        assert (tmp_path / "x" / LOCK_FILE).exists()


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot be written: Not a directory. Try: another --save_path"),
        hold_folder(tmp_path / "file" / "out", "--save_path"),
    ):
        pass


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    """In a folder of another user, it may lead to any file of this user."""
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot be written"), hold_folder(tmp_path / "shared", "--run_dir"):
        pass
    assert (tmp_path / "precious").read_text() == "thesis"
