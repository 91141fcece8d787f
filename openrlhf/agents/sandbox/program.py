"""Run programs written by a model, isolated from the machine, with limits on time, memory, processes, output and disk.

Reward functions and tools call `run_program`:

    from openrlhf.agents.sandbox.program import ProgramLimits, run_program

    result = run_program("print(6 * 7)", limits=ProgramLimits(seconds=2))
    result.stdout == "42\\n" and result.exit_code == 0

A program has read-only access to the system's libraries and this Python, an empty folder in memory and its own
processes, but no network, no other files and no environment of the trainer. When it ends, all its processes are killed.
Each call uses one fork server (`fork_server.py`), isolated by Linux namespaces. If those are forbidden, bubblewrap
(`bwrap`) starts the server instead, once per program, which is slower. Without either, `run_program` raises
ConfigError, unless the caller or OPENRLHF_UNISOLATED_PROGRAMS=1 accepts programs with the user's own permissions.
"""

from __future__ import annotations

import atexit
import base64
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from openrlhf.agents.sandbox.control_group import ControlGroup
from openrlhf.agents.sandbox.fork_server import (
    Program,
    ProgramAnswer,
    ProgramRequest,
    ServerLimits,
    read_frame,
    write_frame,
)
from openrlhf.agents.sandbox.namespaces import ROOT_FOLDERS, SETTINGS, UNPRIVILEGED
from openrlhf.errors import ConfigError

Limit: TypeAlias = Literal["seconds", "cpu_seconds", "memory", "output"]
Isolation: TypeAlias = Literal["namespaces", "bubblewrap", "none"]
OPT_IN = "OPENRLHF_UNISOLATED_PROGRAMS"
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
OWN_PROCESSES = 4  # the server, its parent (two with bubblewrap) and init
OVERHEAD = 64 << 20  # bytes of memory for the server itself


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program. Sizes are in bytes."""

    seconds: float = 5.0
    """Wall-clock time."""
    cpu_seconds: int | None = None
    """Processor time of each process; default: one second more than `seconds`."""
    memory: int = 1 << 30
    """Memory of all processes together if control groups are available, else of each process."""
    processes: int = 32
    """Number of concurrent processes and threads."""
    output: int = 1 << 16
    """Size of standard output and of standard error, each; a program that writes more is killed."""
    file_size: int = 1 << 24
    """Size of each file."""
    disk: int = 1 << 26
    """Size of all files together, which are kept in memory. Not enforced without isolation."""

    def for_server(self, processes: int) -> ServerLimits:
        """Return the limits in the form that the fork server expects; `processes` is the value of RLIMIT_NPROC."""
        cpu = math.ceil(self.seconds) + 1 if self.cpu_seconds is None else self.cpu_seconds
        resources = {
            "RLIMIT_CPU": (cpu, cpu + 1),  # SIGXCPU, then SIGKILL
            "RLIMIT_AS": (self.memory, self.memory),
            "RLIMIT_NPROC": (processes, processes),
            "RLIMIT_FSIZE": (self.file_size, self.file_size),
            "RLIMIT_NOFILE": (256, 256),
            "RLIMIT_CORE": (1, 1),  # unlike 0, it also keeps the kernel from starting a crash handler
        }
        return {"seconds": self.seconds, "output": self.output, "disk": self.disk, "resources": resources}


DEFAULT_LIMITS = ProgramLimits()


@dataclass(frozen=True)
class ProgramResult:
    """Exit code, output and running time of a program."""

    exit_code: int
    """As in subprocess: negative if a signal ended the program."""
    stdout: str
    stderr: str
    limit: Limit | None
    """The limit that the program exceeded, if it was killed for that."""
    seconds: float
    """Wall-clock time of the run."""


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
            return processes + count_tasks(os.getuid())
        return processes if self.isolation == "namespaces" and self.user == UNPRIVILEGED else processes + 3

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


class _Servers:
    """Idle fork servers of this process, and the isolation that works on this machine."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[ForkServer] = []
        self.isolation: Isolation | None = None
        self.failures: dict[Isolation, str] = {}

    def take(self, limits: ProgramLimits, *, allow_unisolated: bool) -> ForkServer:
        """Return an idle server or start one, and set its limits; replace servers whose limits cannot be set."""
        while (idle := self._take_idle(allow_unisolated=allow_unisolated)) is not None:
            try:
                idle.set_limits(limits)
            except OSError:
                idle.close()
            else:
                return idle
        server = self._start(limits.disk, allow_unisolated=allow_unisolated)
        try:
            server.set_limits(limits)
        except OSError as error:
            server.close()
            raise ConfigError(f"the limits of a program cannot be set: {error}") from None
        return server

    def _take_idle(self, *, allow_unisolated: bool) -> ForkServer | None:
        with self.lock:
            usable = [server for server in self.idle if allow_unisolated or server.isolation != "none"]
            if usable:
                self.idle.remove(usable[-1])
            return usable[-1] if usable else None

    def _start(self, disk: int, *, allow_unisolated: bool) -> ForkServer:
        """Start a server with the best isolation that works on this machine."""
        with self.lock:
            if self.isolation is None:  # only the first call tries each kind
                for isolation in ("namespaces", "bubblewrap"):
                    try:
                        server = ForkServer(isolation, disk)
                    except StartError as error:
                        self.failures[isolation] = str(error)
                    else:
                        self.isolation = isolation
                        return server
                self.isolation = "none"
        if self.isolation == "none" and not allow_unisolated:
            reasons = "; ".join(f"{isolation}: {failure}" for isolation, failure in self.failures.items())
            raise ConfigError(
                f"programs cannot be isolated on this machine: expected user namespaces or bubblewrap, got {reasons}",
                try_this=f"allow user namespaces (docs/agents.md), or set {OPT_IN}=1 (allow_unisolated=True in Python) "
                "to run programs with your own permissions",
            )
        try:
            return ForkServer(self.isolation, disk)
        except StartError as error:
            raise ConfigError(f"the fork server for programs cannot be started: {error}") from None

    def give_back(self, server: ForkServer) -> None:
        if server.is_reusable:
            with self.lock:
                self.idle.append(server)
        else:
            server.close()

    def close(self) -> None:
        """Stop the idle servers; the next call starts new ones."""
        with self.lock:
            idle = self.idle.copy()
            self.idle.clear()
        for server in idle:
            server.close()


_servers = _Servers()


def _forget_servers() -> None:
    """Forget the servers in a forked child: they belong to the parent."""
    global _servers
    _servers = _Servers()


os.register_at_fork(after_in_child=_forget_servers)


def close_servers() -> None:
    """End the idle processes that `run_program` keeps for its next calls; this also happens at exit."""
    _servers.close()


atexit.register(close_servers)


def working_isolation() -> Isolation:
    """Return how programs are isolated on this machine, after running one; raise ConfigError if they cannot be."""
    run_program("pass", allow_unisolated=False)
    assert _servers.isolation is not None
    return _servers.isolation


def run_program(
    source: str | None = None,
    *,
    argv: Sequence[str] = (),
    stdin: str | bytes = "",
    files: Mapping[str, str | bytes] | None = None,
    limits: ProgramLimits = DEFAULT_LIMITS,
    channel: socket.socket | None = None,
    allow_unisolated: bool | None = None,
) -> ProgramResult:
    """Run Python source or the command `argv`, and return its exit code and output.

    `files` maps relative paths in the program's working folder to contents. `channel` becomes the program's
    descriptor 3 and is closed here. Calls from several threads run at the same time; in async code, use
    `asyncio.to_thread`. `allow_unisolated` allows programs on a machine that cannot isolate them (default: only if the
    environment variable OPENRLHF_UNISOLATED_PROGRAMS is 1).
    """
    with channel or nullcontext():
        program = make_program(source, argv, stdin, files or {}, limits)
        if allow_unisolated is None:
            allow_unisolated = os.environ.get(OPT_IN) == "1"
        server = _servers.take(limits, allow_unisolated=allow_unisolated)
        try:
            return server.run(program, limits, channel)
        finally:
            _servers.give_back(server)


def make_program(
    source: str | None, argv: Sequence[str], stdin: str | bytes, files: Mapping[str, str | bytes], limits: ProgramLimits
) -> Program:
    """Check the arguments of `run_program`, and encode them for the server."""
    if (source is None) == (not argv):
        raise ValueError("the program is missing or given twice: expected either Python source or argv")
    given = dict(files) if source is None else {"program.py": source} | dict(files)
    contents = {name: encode(data) for name, data in given.items()}
    for name in contents:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
            raise ValueError(f"invalid file name of a program: expected a relative path, got {name!r}")
    size = sum(map(len, contents.values())) * 3 // 4 + len(stdin)
    if size > limits.disk:
        raise ValueError(
            f"the program's files and stdin do not fit: expected at most {limits.disk} bytes (limits.disk), got about"
            f" {size}"
        )
    return {"source": source or "", "argv": list(argv), "stdin": encode(stdin), "files": contents}


def encode(data: str | bytes) -> str:
    """Encode text or bytes for JSON; text may hold lone surrogates, as a decoded model output can."""
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    return base64.b64encode(raw).decode()
