"""What a private Ray leaves behind is removed, however its run ends. Plain processes stand for those of Ray."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from openrlhf.cluster.reaper import ALIVE, KEPT, KEPT_SECONDS, PREFIX, private_folder, remove_leftovers
from tests.cluster.ray_machine import end, wait_until_gone

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from openrlhf.cluster.reaper import MARK, private_folder
with private_folder(Path(sys.argv[1])) as folder:
    marked = os.environ | {MARK: str(folder)}
    log = open(folder / "ray.log", "w")
    # Like Ray's agents, the second process has lost its environment, and writes to a log.
    words = ["sh", "-c", "env -i sleep 1000 & echo up; wait"]
    agent = subprocess.Popen(words, env=marked, start_new_session=True, stdout=subprocess.PIPE, stderr=log)
    agent.stdout.readline()
    if os.fork() == 0:  # a child that holds all open files, as those of multiprocessing do
        time.sleep(1000)
    print("up", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def driver(parent):
    """Run the driver; yield it, its reaper and its agents. All of them are killed at the end."""
    words = [sys.executable, "-c", DRIVER, str(parent)]
    running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "up\n"
    children = psutil.Process(running.pid).children(recursive=True)
    (reaper,) = [one for one in children if str(parent) in " ".join(one.cmdline()) and "-I" in one.cmdline()]
    fork = [one for one in children if one.cmdline() == psutil.Process(running.pid).cmdline()]
    agents = [one for one in children if one != reaper and one not in fork]
    assert len(agents) == 2
    try:
        yield running, reaper, [one.pid for one in agents]
    finally:
        end([running.pid, *(one.pid for one in children)])
        running.communicate()


@pytest.mark.parametrize("how", ["killed", "finished"])
def test_processes_and_folder_go_with_the_driver(tmp_path, how):
    with driver(tmp_path) as (running, reaper, agents):
        assert len(list(tmp_path.iterdir())) == 1
        if how == "killed":
            running.send_signal(signal.SIGKILL)
        else:
            running.stdin.write("\n")
            running.stdin.flush()
        assert wait_until_gone([reaper.pid, *agents])
        assert list(tmp_path.iterdir()) == []
        if how == "finished":
            assert running.wait() == 0


def test_leftovers_of_a_run_that_was_killed_with_its_reaper_are_removed_by_the_next(tmp_path):
    with driver(tmp_path) as (killed, _, agents), private_folder(tmp_path) as alive:
        (left,) = [one for one in tmp_path.iterdir() if one != alive]
        assert remove_leftovers(tmp_path) == []  # both are alive
        end([one.pid for one in psutil.Process(killed.pid).children() if one.pid not in agents])  # they share its lock
        killed.kill()
        killed.wait()
        assert remove_leftovers(tmp_path) == [left]
        assert wait_until_gone(agents)
        assert list(tmp_path.iterdir()) == [alive]


def test_logs_are_kept_for_a_week(tmp_path):
    with private_folder(tmp_path) as folder:
        (folder / KEPT).touch()
    assert remove_leftovers(tmp_path) == []
    long_ago = time.time() - KEPT_SECONDS - 60
    os.utime(folder, (long_ago, long_ago))
    assert remove_leftovers(tmp_path) == [folder]


def test_folders_that_are_not_ours_stay(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ALIVE).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}new").mkdir()  # another run is about to lock it
    assert remove_leftovers(tmp_path) == []
    assert Path(elsewhere / ALIVE).exists()
