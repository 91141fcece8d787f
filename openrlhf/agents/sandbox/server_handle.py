"""Trainer-side handle of a fork server: start it under the chosen isolation, run one program at a time, stop it.

The server's process gets a clean environment and, if the kernel allows it, its own control group. Namespaces are
entered by the server itself; bubblewrap is a command that starts it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from openrlhf.agents.sandbox.control_group import ControlGroup
from openrlhf.agents.sandbox.namespaces import ROOT_FOLDERS, SETTINGS, UNPRIVILEGED
from openrlhf.agents.sandbox.program_frames import Program, ProgramAnswer, ProgramRequest, read_frame, write_frame
from openrlhf.agents.sandbox.program_limits import Limit, ProgramLimits, ProgramResult
from openrlhf.errors import ConfigError

Isolation: TypeAlias = Literal["namespaces", "bubblewrap", "none"]
START = (
    "import sys; sys.path.insert(0, {root}); from openrlhf.agents.sandbox.fork_server import main; "
    "sys.path.remove({root}); main({descriptor}, {isolation})"
)
# Shell script that joins the control groups in its arguments, then becomes the command after "--". If memory runs out,
# the kernel should kill programs and their server, not the trainer; inside the sandbox, /proc cannot be written.
JOIN = (
    "{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; "
    'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'
)
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
START_SECONDS = 60.0  # time limit for starting a server, on a busy machine
GRACE_SECONDS = 30.0  # time for the server to kill a program and answer
OWN_PROCESSES = 5  # the server, its parent (two with bubblewrap), runner and init
OVERHEAD = 64 << 20  # bytes of memory for the server itself


class StartError(Exception):
    """A fork server cannot run on this machine; the message gives the reason."""


class ForkServer:
    """Handle of a fork server: start it, run one program at a time, stop it."""

    def __init__(self, isolation: Isolation, disk: int) -> None:
        self.isolation = isolation
        self.group = ControlGroup.create() if sys.platform == "linux" else None
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(START_SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                self._command(theirs.fileno(), disk),
                env=clean_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self.user = self._read_start()
        except StartError:
            self.close()
            raise

    def _command(self, descriptor: int, disk: int) -> list[str]:
        inner = "namespaces" if self.isolation == "namespaces" else "none"
        start = START.format(root=json.dumps(PACKAGE_ROOT), descriptor=descriptor, isolation=json.dumps(inner))
        # Not -I: it would ignore PYTHONHASHSEED, and sets would be ordered differently in each server.
        command = [sys.executable, "-P", "-s", "-X", "utf8", "-c", start]
        if self.isolation == "bubblewrap":
            command = [*bubblewrap_command(disk), *command]
        if sys.platform == "linux":
            command = ["/bin/sh", "-c", JOIN, "sh", *(self.group.members if self.group else ()), "--", *command]
        return command

    def _read_start(self) -> int:
        """Wait until the server is ready; return the id of the user that programs run as."""
        try:
            frame = read_frame(self.connection)
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from None
        if frame is None:
            assert self.process.stderr is not None
            text = self.process.stderr.read().decode(errors="replace").strip()
            raise StartError(text.splitlines()[-1] if text else "its process ended without an error message")
        if "failed" in frame[0]:
            raise StartError(frame[0]["failed"])
        if self.isolation == "bubblewrap":
            return os.getuid()  # the user outside the sandbox
        if self.isolation != "none" and frame[0]["user"] == 0 and self.group is None:
            raise StartError(
                "programs would run as root, with no limit on their processes, because no control group can be created"
            )
        return frame[0]["user"]

    def set_limits(self, limits: ProgramLimits) -> None:
        """Set the limits of the control group; raise OSError if memory that an earlier program left exceeds them."""
        if self.group is not None:
            self.group.limit(limits.memory + OVERHEAD, limits.processes + OWN_PROCESSES)

    def run(self, program: Program, limits: ProgramLimits, channel: socket.socket | None) -> ProgramResult:
        """Run one program after `set_limits`; if it ends the server, report it as killed."""
        kills = 0 if self.group is None else self.group.count_kills()
        self.connection.settimeout(limits.seconds + GRACE_SECONDS)
        allowed = limits.for_server(self._most_processes(limits.processes))
        request: ProgramRequest = {"program": program, "limits": allowed}
        answer: ProgramAnswer | None = None
        with suppress(OSError, ValueError):
            write_frame(self.connection, request, () if channel is None else (channel.fileno(),))
            if channel is not None:
                channel.close()  # so that its other end notices when the program ends
            frame = read_frame(self.connection)
            answer = None if frame is None else frame[0]
        out_of_memory = self.group is not None and self.group.count_kills() > kills
        if answer is None:
            self.kill()
            return ProgramResult(-signal.SIGKILL, "", "", "memory" if out_of_memory else None, limits.seconds)
        if answer["failed"]:
            raise ConfigError(f"a program could not be started: {answer['failed']}")
        limit: Limit | None = answer["limit"]
        if limit is None and out_of_memory:
            limit = "memory"
        elif limit is None and answer["code"] == -signal.SIGXCPU:
            limit = "cpu_seconds"
        return ProgramResult(answer["code"], answer["stdout"], answer["stderr"], limit, answer["seconds"])

    def _most_processes(self, processes: int) -> int:
        """Return RLIMIT_NPROC, which counts all processes of the program's user in its user namespace."""
        if self.isolation == "none":
            return processes + count_tasks(os.getuid()) + 2  # the runner and init, which do not exist yet
        if self.isolation == "namespaces" and self.user == UNPRIVILEGED:
            return processes
        return processes + OWN_PROCESSES - 1  # the first parent is outside the user namespace

    @property
    def is_reusable(self) -> bool:
        return self.isolation != "bubblewrap" and self.process.poll() is None

    def kill(self) -> None:
        """Kill the server; with namespaces or bubblewrap, the kernel then kills the program."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Close the socket, which makes the server exit, and remove its control groups."""
        self.connection.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.group is not None:
            self.group.remove()


def clean_environment() -> dict[str, str]:
    """Return the environment of programs; only the library path is taken from the trainer's."""
    folders = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": ":".join(dict.fromkeys(folders)),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def bubblewrap_command(disk: int) -> list[str]:
    """Return the command line of bubblewrap up to the command that it runs; /tmp holds `disk` bytes."""
    program = shutil.which("bwrap")
    if program is None:
        raise StartError("bwrap is not installed")
    shown = [*ROOT_FOLDERS, *SETTINGS, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--size", str(disk), "--tmpfs", "/tmp"]  # first: the environment may be below it
    for path in dict.fromkeys(shown):
        if os.path.islink(path) and path in ROOT_FOLDERS:
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", f"{PACKAGE_ROOT}/openrlhf", f"{PACKAGE_ROOT}/openrlhf"]
    user = ["--uid", str(UNPRIVILEGED), "--gid", str(UNPRIVILEGED)] if os.getuid() == 0 else []
    command += [*user, "--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(disk), "--tmpfs", "/dev/shm"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def count_tasks(user: int) -> int:
    """Return how many processes and threads a user has on this machine."""
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            if tasks.stat().st_uid == user:
                count += len(os.listdir(tasks))
    return count
