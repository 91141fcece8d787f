"""Drivers of Ray as processes of their own, each set with a home and a temporary folder that tell them apart."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.commands import free_port
from tests.warm import warm_children

HERE = Path(__file__).parent
COLD = {"PYTHONPATH": str(HERE.parents[1])}  # surroundings in which programs start as anywhere
WATCHDOG = 400  # seconds; a generous watchdog, since a whole run loads Ray, vLLM and DeepSpeed on two cores


class Machine:
    """A home and a temporary folder in which drivers start, with a short path as Ray's sockets need it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "home").mkdir()
        self.surroundings = warm_children()
        self.python = link_interpreter(folder / "environment")  # Ray does not bear a space in its path

    def start(self, scene, flags="", **environ):
        return self.open([str(HERE / "ray_drivers.py"), scene, *flags.split()], **environ)

    def open(self, argv, **environ):
        """A Python process, its standard streams in our hands."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_"))}
        places = {"HOME": f"{self.folder}/home", "RAY_TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [self.python, *argv],
            env=kept | places | self.surroundings | environ,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def see(self, scene, flags="", **environ):
        """What a driver saw, and what it said."""
        with self.start(scene, flags, **environ) as driver:
            out, said = driver.communicate(timeout=WATCHDOG)
        assert out, said
        return json.loads(out.splitlines()[-1]), said

    def processes(self):
        """All that run with this folder in their environment."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self.is_ours(path)]

    def is_ours(self, path):
        try:
            return f"RAY_TMPDIR={self.folder}\0".encode() in path.read_bytes()
        except OSError:  # it has ended, or is another user's
            return False


def link_interpreter(environment):
    """This interpreter and its packages under another path."""
    environment.symlink_to(sys.prefix)
    return str(environment / Path(sys.executable).relative_to(sys.prefix))


def make_machine():
    return Machine(Path(tempfile.mkdtemp(prefix="or", dir="/tmp")))


def wait_until_gone(processes):
    """True when all of them have ended before the watchdog barks."""
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
        with suppress(ProcessLookupError):  # it ended with another one
            os.kill(process, signal.SIGKILL)
    assert wait_until_gone(processes)


def start_head(machine, port, dashboard=("--include-dashboard", "false"), **environ):
    """As a person does it; it stays when the command has ended."""
    ports = ["--port", port, "--ray-client-server-port", free_port(), "--dashboard-agent-listen-port", "0"]
    small = ["--num-cpus", "4", "--num-gpus", "0", *dashboard]
    with machine.open(["-m", "ray.scripts.scripts", "start", "--head", *ports, *small], **environ) as starting:
        out, said = starting.communicate(timeout=WATCHDOG)
    assert starting.returncode == 0, out + said
