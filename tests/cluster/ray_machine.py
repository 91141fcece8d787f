"""Start Ray drivers as processes, as if each test had its own machine.

A `Machine` has its own HOME and Ray folder, so its drivers see only the Ray clusters started there, and the test can
find and end every process that a driver left behind: they all carry the folder in their environment.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.commands import free_port
from tests.warm import warm_children

HERE = Path(__file__).parent
COLD = {"PYTHONPATH": str(HERE.parents[1])}  # environment in which programs start as usual, importing everything
WATCHDOG = 400  # seconds; a whole run loads Ray, vLLM and DeepSpeed, on two cores


class Machine:
    """A HOME and a temporary folder for drivers. The path is short because the paths of Ray's sockets are limited."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "home").mkdir()
        self.environ = warm_children()
        self.python = link_interpreter(folder / "environment")  # Ray fails if its path has a space

    def start_driver(self, driver, flags="", **environ):
        return self.start_python([str(HERE / "ray_drivers.py"), driver, *flags.split()], **environ)

    def start_python(self, argv, **environ):
        """Start a Python process with pipes as its standard streams."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_"))}
        folders = {"HOME": f"{self.folder}/home", "RAY_TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [self.python, *argv],
            env=kept | folders | self.environ | environ,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_driver(self, driver, flags="", **environ):
        """Run a driver of ray_drivers.py; return what it printed as JSON, and its standard error."""
        with self.start_driver(driver, flags, **environ) as process:
            out, stderr = process.communicate(timeout=WATCHDOG)
        assert out, stderr
        return json.loads(out.splitlines()[-1]), stderr

    def processes(self):
        """Return the pids of all processes with this folder in their environment."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self.belongs_here(path)]

    def settled_processes(self):
        """Return the pids once they no longer change: a process that has just been started shows no environment."""
        before = None
        while (found := self.processes()) != before:
            before = found
            time.sleep(0.5)
        return found

    def belongs_here(self, path):
        try:
            return f"RAY_TMPDIR={self.folder}\0".encode() in path.read_bytes()
        except OSError:  # it has ended, or belongs to another user
            return False


def link_interpreter(environment):
    """Make this interpreter and its packages available under another path; return the interpreter."""
    environment.symlink_to(sys.prefix)
    return str(environment / Path(sys.executable).relative_to(sys.prefix))


def make_machine():
    return Machine(Path(tempfile.mkdtemp(prefix="or", dir="/tmp")))


def wait_until_gone(processes):
    """Wait for these processes to end; return whether all did before the timeout."""
    for process in processes:
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        if not select.select([handle], [], [], WATCHDOG)[0]:
            return False
        os.close(handle)
    return True


def end(processes):
    for process in processes:
        with suppress(ProcessLookupError):  # it ended together with another one
            os.kill(process, signal.SIGKILL)
    assert wait_until_gone(processes)


def start_head(machine, port, dashboard=("--include-dashboard", "false"), **environ):
    """Run `ray start --head` as a user would; the head keeps running when the command has ended."""
    ports = ["--port", port, "--ray-client-server-port", free_port(), "--dashboard-agent-listen-port", "0"]
    small = ["--num-cpus", "4", "--num-gpus", "0", *dashboard]
    with machine.start_python(["-m", "ray.scripts.scripts", "start", "--head", *ports, *small], **environ) as starting:
        out, stderr = starting.communicate(timeout=WATCHDOG)
    assert starting.returncode == 0, out + stderr
