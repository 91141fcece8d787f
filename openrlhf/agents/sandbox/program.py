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
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import PurePosixPath

from openrlhf.agents.sandbox.program_frames import Program
from openrlhf.agents.sandbox.program_limits import DEFAULT_LIMITS, ProgramLimits, ProgramResult
from openrlhf.agents.sandbox.server_handle import ForkServer, Isolation, StartError
from openrlhf.errors import ConfigError

OPT_IN = "OPENRLHF_UNISOLATED_PROGRAMS"


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
    """Run a program to find out how this machine isolates programs; raise ConfigError if it cannot."""
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
