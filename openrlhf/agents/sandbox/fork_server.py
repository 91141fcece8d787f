"""Process that runs programs written by a model, each in a fork of its preloaded interpreter.

`server_handle.ForkServer` starts it with a clean environment and sends it one program at a time. With `isolation`
"namespaces" the processes are:

    server        own user, mount, network and UTS namespaces; root folder of read-only binds
      runner      reads one request, collects the output, answers; never runs a program's code
        init      own pid, mount and IPC namespaces, so own /proc and own /tmp; its end kills every process of the run
          program unprivileged user, no capabilities, system-call filter, resource limits; only descriptors 0 to 3

With "none" (inside bubblewrap, or at the user's request) the runner kills the descendants of a program instead.

The server itself never reads a request or an output, because all later programs inherit its memory: a program that
reads all its memory finds the standard library and itself, but nothing of the programs before it.

`program_frames.py` defines what the two sides send each other.
"""

from __future__ import annotations

import atexit
import base64
import gc
import importlib
import os
import platform
import resource
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from typing import Literal, NoReturn

from openrlhf.agents.sandbox import linux
from openrlhf.agents.sandbox.descendants import adopt_orphans, kill_descendants
from openrlhf.agents.sandbox.namespaces import enter_namespaces, make_root
from openrlhf.agents.sandbox.program_frames import (
    Program,
    ProgramAnswer,
    ProgramRequest,
    ServerLimits,
    read_frame,
    write_frame,
)

FILES_PER_MEBIBYTE = 64  # limits the inodes of a program's folder, which use kernel memory
PRELOADED = (
    *("abc", "array", "ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal"),
    *("enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "pathlib"),
    *("queue", "random", "re", "statistics", "string", "subprocess", "textwrap", "time", "typing", "unittest"),
)


class ProgramServer:
    """The fork server: sets up the isolation once, then runs one program per request."""

    def __init__(self, connection: socket.socket, isolation: str) -> None:
        self.connection, self.isolated = connection, isolation == "namespaces"
        self.user = os.getuid(), os.getgid()
        self.hidden: list[str] = []  # mounts that a program's own /tmp would hide
        self.filter = b""
        if sys.platform == "linux" and platform.machine() in linux.SYSTEM_CALLS:
            self.filter = linux.make_filter(platform.machine())
        if self.isolated:
            if not self.filter:
                supported = " or ".join(linux.SYSTEM_CALLS)
                raise OSError(f"expected Linux on {supported}, got {sys.platform} on {platform.machine()}")
            self.user = enter_namespaces(connection)
            self.hidden = make_root()
        else:
            adopt_orphans()
        if sys.platform == "linux":
            linux.prctl(linux.SET_DUMPABLE, 0)  # keeps programs of the same user from tracing this process

    def serve(self) -> None:
        """Fork a runner for each request until the other end closes the socket, or until a runner is killed."""
        while self.connection.recv(1, socket.MSG_PEEK):
            runner = os.fork()
            if runner == 0:
                self._be_runner()
            while (ended := os.waitpid(-1, 0))[0] != runner:
                pass  # a process whose runner was killed
            if ended[1] != 0:
                break
        if not self.isolated:
            kill_descendants()

    def _be_runner(self) -> NoReturn:
        """Read one request, run its program, answer, and end."""
        code = 1
        try:
            if sys.platform == "linux":
                linux.prctl(linux.PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if not self.isolated:
                adopt_orphans()
            if (frame := read_frame(self.connection)) is not None:
                request, descriptors = frame
                try:
                    answer = self.run(request, descriptors)
                except OSError as error:
                    answer = {"failed": str(error), "code": 1, "limit": None, "seconds": 0, "stdout": "", "stderr": ""}
                write_frame(self.connection, answer)
                code = 0
        except BaseException:  # noqa: BLE001 - this process must end here, whatever happens
            traceback.print_exc()
        os._exit(code)

    def run(self, request: ProgramRequest, descriptors: list[int]) -> ProgramAnswer:
        """Run one program to its end; return its exit code, its output and the limit it exceeded."""
        folder = "/tmp" if self.isolated else tempfile.mkdtemp(prefix="openrlhf-program-")
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "status")}
        began = time.monotonic()
        try:
            if self.isolated:
                linux.unshare(linux.NEW_PIDS)
            init = os.fork()
            if init == 0:
                self._be_init(request, folder, pipes, descriptors)
            for _, write in pipes.values():
                os.close(write)
            reads = {name: read for name, (read, _) in pipes.items()}
            written, limit = self._watch(init, reads, request["limits"], began)
        finally:
            if not self.isolated:
                kill_descendants()
                shutil.rmtree(folder, ignore_errors=True)
        status = written["status"].decode()
        return {
            "failed": status.removeprefix("setup: ") if status.startswith("setup: ") else "",
            "code": int(status) if status.lstrip("-").isdecimal() else -signal.SIGKILL,
            "limit": limit,
            "seconds": time.monotonic() - began,
            "stdout": written["stdout"].decode(errors="replace"),
            "stderr": written["stderr"].decode(errors="replace"),
        }

    def _watch(
        self, init: int, reads: dict[str, int], limits: ServerLimits, began: float
    ) -> tuple[dict[str, bytes], Literal["seconds", "output"] | None]:
        """Collect the output of a run until init ends; kill the run at the deadline or if the output is too large."""
        written = {name: bytearray() for name in reads}
        limit: Literal["seconds", "output"] | None = None
        with selectors.DefaultSelector() as selector:
            for name, descriptor in reads.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            selector.register(self.connection, selectors.EVENT_READ, "owner")
            while "status" in (waiting := {key.data for key in selector.get_map().values()}) or (
                self.isolated and waiting != {"owner"}
            ):
                left = began + limits["seconds"] - time.monotonic()
                if limit is None and left <= 0:
                    limit = "seconds"
                    self._kill(init)
                for key, _ in selector.select(left if limit is None else None):
                    if key.data == "owner":  # the owner sends nothing during a run, so it is gone
                        self._kill(init)
                        os._exit(1)
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                    data = written[key.data]
                    data += part
                    if len(data) > limits["output"]:
                        del data[limits["output"] :]
                        if limit is None:
                            limit = "output"
                            self._kill(init)
            if not self.isolated:  # a daemon of the program may still hold the pipes
                for key in list(selector.get_map().values()):
                    if key.data in written:
                        os.set_blocking(key.fd, False)
                        with suppress(BlockingIOError):
                            written[key.data] += os.read(key.fd, limits["output"] - len(written[key.data]))
                        os.close(key.fd)
        with suppress(ChildProcessError):
            os.waitpid(init, 0)  # in a pid namespace, this waits until all its processes have ended
        return {name: bytes(data) for name, data in written.items()}, limit

    def _kill(self, init: int) -> None:
        if self.isolated:
            os.kill(init, signal.SIGKILL)
        else:
            kill_descendants()

    def _be_init(
        self, request: ProgramRequest, folder: str, pipes: dict[str, tuple[int, int]], descriptors: list[int]
    ) -> NoReturn:
        """Act as the first process of a run: prepare its folder, start the program, report its exit code, and end."""
        status = pipes["status"][1]
        try:
            if sys.platform == "linux":
                linux.prctl(linux.PARENT_DEATH_SIGNAL, signal.SIGKILL)
            self.connection.close()
            if self.isolated:
                self._mount(request["limits"])
            program = os.fork()
            if program == 0:
                self._be_program(request, folder, [pipes[name][1] for name in ("stdout", "stderr")], descriptors)
            for name in ("stdout", "stderr"):
                os.close(pipes[name][1])
            while True:
                ended, code = os.waitpid(-1, 0)
                if ended == program:
                    break
            os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
        except BaseException as error:  # noqa: BLE001 - this process must end here, whatever happens
            os.write(status, f"setup: {error}".encode())
        os._exit(0)

    def _mount(self, limits: ServerLimits) -> None:
        """Mount the program's own /tmp, of limited size, and a /proc that shows only its processes.

        An environment below /tmp stays visible.
        A program must not write to /proc: it could lower its oom_score_adj, and the kernel would kill the trainer.
        """
        linux.unshare(linux.NEW_MOUNTS | linux.NEW_IPC)
        inodes = max(limits["disk"] >> 20, 1) * FILES_PER_MEBIBYTE
        options = f"mode=700,size={limits['disk']},nr_inodes={inodes},uid={self.user[0]},gid={self.user[1]}"
        hidden = [(path, linux.copy_mount(path)) for path in self.hidden]
        linux.mount("tmpfs", "/tmp", "tmpfs", linux.NO_SUID | linux.NO_DEVICES, options)
        for path, descriptor in hidden:
            os.makedirs(path)
            linux.attach_mount(descriptor, path)
        if os.listdir("/proc"):
            linux.mount("proc", "/proc", "proc", linux.NO_SUID | linux.NO_DEVICES | linux.READ_ONLY, "subset=pid")

    def _be_program(self, request: ProgramRequest, folder: str, outputs: list[int], descriptors: list[int]) -> NoReturn:
        """Drop privileges and all descriptors except 0, 1, 2 and an optional 3, then run the program."""
        try:
            os.setsid()
            for target, descriptor in enumerate(outputs, start=1):
                os.dup2(descriptor, target)
            if descriptors:
                os.dup2(descriptors[0], 3)
            os.closerange(4 if descriptors else 3, os.sysconf("SC_OPEN_MAX"))
            if self.isolated:
                linux.drop_privileges(*self.user)
            if sys.platform == "linux":
                linux.prctl(linux.NO_NEW_PRIVILEGES, 1)
                linux.prctl(linux.SET_DUMPABLE, 1)  # otherwise the program could not open /proc/self
            enter_folder(folder, request["program"])
            limit_resources(request["limits"]["resources"])
            if self.filter:
                linux.filter_system_calls(self.filter)
        except BaseException as error:  # noqa: BLE001 - this process must end here, whatever happens
            os.write(2, f"the sandbox could not start the program: {error}\n".encode())
            os._exit(126)
        try:
            run_program(request["program"], folder)
        finally:
            os._exit(1)  # reached only after an exception in the program's exit functions


def limit_resources(resources: dict[str, tuple[int, int]]) -> None:
    """Set soft and hard limits, named as in the `resource` module and capped at the current hard limits."""
    for name, wanted in resources.items():
        allowed = resource.getrlimit(getattr(resource, name))[1]
        capped = [most if allowed == resource.RLIM_INFINITY else min(most, allowed) for most in wanted]
        resource.setrlimit(getattr(resource, name), (capped[0], capped[1]))


def enter_folder(folder: str, program: Program) -> None:
    """Change to the program's folder, and write its files and its standard input there."""
    os.umask(0o077)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    for name, data in program["files"].items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(data))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(base64.b64decode(program["stdin"]))
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)


def run_program(program: Program, folder: str) -> NoReturn:
    """Run the program in this process, as the interpreter would, and exit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if program["argv"]:
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these signals
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        try:
            os.execvp(program["argv"][0], program["argv"])
        except (OSError, ValueError) as error:  # no such program, or a null character
            os.write(2, f"{program['argv'][0]!r}: {error}\n".encode())
            os._exit(127)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    path = os.path.join(folder, "program.py")
    sys.argv, sys.path[:0] = [path], [folder]
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(program["source"], path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not (end.code is None or isinstance(end.code, int)):
            print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        first = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this function
        traceback.print_exception(type(error), error, first)
        code = 1
    getattr(threading, "_shutdown")()  # noqa: B009 - waits for the program's threads; missing in the type stubs
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def main(descriptor: int, isolation: str) -> None:
    """Run the server on a socket; first report whether the isolation works."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program could trigger a Python handler in init
    connection = socket.socket(fileno=descriptor)
    try:
        server = ProgramServer(connection, isolation)
    except OSError as error:
        write_frame(connection, {"failed": str(error.strerror or error)})
        return
    for name in PRELOADED:
        importlib.import_module(name)
    atexit._clear()
    gc.collect()
    gc.freeze()
    write_frame(connection, {"user": server.user[0]})
    server.serve()
