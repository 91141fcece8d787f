"""Starting and stopping CUDA MPS, with a script in place of NVIDIA's daemon."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from openrlhf.rollout.mps import CONTROL, DRIVER
from tests.commands import command_environ

WATCHDOG = 60.0  # seconds
DAEMON = """#!/bin/sh
if [ "$1" = -f ]; then
    echo start >> "$COMMANDS"
    test "$BROKEN" && { echo "no permission for the GPU" > "$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
    mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
    read -r command < "$CUDA_MPS_PIPE_DIRECTORY/control"
    exit 0
fi
read -r command
test -p "$CUDA_MPS_PIPE_DIRECTORY/control" || exit 1
echo "$command" >> "$COMMANDS"
test "$command" = quit && echo quit > "$CUDA_MPS_PIPE_DIRECTORY/control"
exit 0
"""
TRAINER = """
import os, sys
from openrlhf.rollout.mps import start_mps
for _ in range(2):  # as two runs in one notebook: the second uses what the first started
    clients = start_mps()
assert "CUDA_MPS_LOG_DIRECTORY" not in os.environ  # this process is not a client
print(clients.problem, clients.variables.get("CUDA_MPS_PIPE_DIRECTORY"), sep="|", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started(tmp_path):
    """Start a process that calls `start_mps`; yield it, the problem, the daemon's folder and all commands."""

    @contextmanager
    def start(**environ):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / CONTROL).write_text(DAEMON)
        (folder / CONTROL).chmod(0o755)
        commands = tmp_path / "commands"
        commands.touch()
        (folder / DRIVER).touch()  # hides the driver of a machine with GPUs, which the script does not serve
        usual = {name: value for name, value in command_environ().items() if not name.startswith("CUDA_MPS")}
        environ = (
            usual
            | {"PATH": f"{folder}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder), "COMMANDS": str(commands)}
            | environ
        )
        words = [sys.executable, "-c", TRAINER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, **pipes, text=True, env=environ) as process:
            problem, folder = process.stdout.readline().strip().split("|")
            try:
                yield process, problem, folder, lambda: commands.read_text().split()
            finally:
                process.kill()

    return start


@pytest.mark.parametrize("killed", [True, False])
def test_the_daemon_ends_after_the_process_that_started_it(killed, started):
    with started() as (process, problem, folder, commands):
        assert problem == ""
        assert Path(folder).is_dir()
        assert commands().count("start") == 1
        helpers = psutil.Process(process.pid).children(recursive=True)
        if killed:
            process.kill()
        else:
            process.stdin.close()
        _, alive = psutil.wait_procs(helpers, timeout=WATCHDOG)
        assert not alive
        assert not Path(folder).exists()
        assert commands()[-1] == "quit"


def test_a_daemon_that_cannot_start_is_reported_with_its_reason(started):
    with started(BROKEN="yes") as (process, problem, folder, commands):
        assert problem == f"{CONTROL} cannot start: no permission for the GPU"
        assert folder == "None"
        assert psutil.Process(process.pid).children() == []
        assert commands() == ["start"]


def test_without_the_program_nothing_is_started(started):
    with started(PATH="/nowhere") as (process, problem, _, _):
        assert problem == f"{CONTROL} is not installed"
        assert psutil.Process(process.pid).children() == []


def test_an_mps_of_the_user_is_used_as_it_is(started, tmp_path):
    with started(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)) as (_, problem, folder, commands):
        assert problem == ""
        assert folder == "None"  # nothing to add: engines inherit the variable
        assert commands() == []
