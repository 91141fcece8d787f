"""Start Python programs in milliseconds, by forking an interpreter that has already imported torch and vLLM.

Importing torch, Transformers and vLLM takes about ten seconds, and the suite starts hundreds of processes. So one
server imports them once (tests.warm starts it and chooses the modules), and every program is a fork of that server:

    python fork_server.py serve SOCKET OWNER MODULE...   import the modules, then fork a program for each client;
                                                         end with the process OWNER
    python fork_server.py run SOCKET -m MODULE ...       a client, used in place of `python -m MODULE ...`

      test ── starts ──> client ── request over SOCKET ──> server ── fork ──> program
                           ^  signals to the client are forwarded to the program  │
                           └─────── exit status, passed on by the server ─────────┘

The client imports only the standard library. It sends its arguments, environment, working directory, interpreter and
standard streams; the program takes them over and runs as if it had been started directly. The client forwards signals
and ends with the program's exit code or signal. If the client is killed, the server kills the program. To kill the
program itself, send KILL to the client, which ends after it: nothing is written once the client is gone.

What stays cold: the program is a child of the server, not of the test. So tests of process trees, terminals and imports
start `sys.executable` directly. Ray is not imported in the server either, because it reads its settings from the
environment when it is imported.
"""

import array
import atexit
import gc
import importlib
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LENGTH = struct.Struct("!I")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KILL = signal.SIGRTMIN
STREAMS = 3  # descriptors 0 to 2: standard input, output and error


def run(address: str, argv: list[str]) -> None:
    """Run a program as a client; end with its exit code or signal."""
    wakeup, wakeup_sender = socket.socketpair()  # signals write to it, so one that arrives before `select` is not lost
    wakeup_sender.setblocking(False)
    signal.set_wakeup_fd(wakeup_sender.fileno())
    for signum in (*FORWARDED, KILL):
        signal.signal(signum, lambda *_: None)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"argv": argv, "environ": dict(os.environ), "folder": os.getcwd(), "executable": sys.executable}
    task = json.dumps(request).encode()
    streams = array.array("i", range(STREAMS))
    connection.sendmsg([LENGTH.pack(len(task))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(task)
    (pid,) = LENGTH.unpack(receive(connection, LENGTH.size))
    while connection not in (ready := select.select([connection, wakeup], [], [])[0]):
        for signum in wakeup.recv(4096) if wakeup in ready else ():
            os.kill(pid, signal.SIGKILL if signum == KILL else signum)
    (status,) = LENGTH.unpack(receive(connection, LENGTH.size))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received


class Server:
    """Fork a program for each client. `serve` returns only in a forked program, with its arguments."""

    def __init__(self, address: str, owner: int) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        self.clients: dict[int, socket.socket] = {}  # by pid of the program
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.wakeup, wakeup_sender = socket.socketpair()  # SIGCHLD writes to it
        for end in (self.wakeup, wakeup_sender):
            end.setblocking(False)
        self.wakeup_sender = wakeup_sender
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for pytest; the server ends with it
        signal.set_wakeup_fd(wakeup_sender.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.wakeup, selectors.EVENT_READ)
        self.owner = os.pidfd_open(owner)
        self.selector.register(self.owner, selectors.EVENT_READ)

    def serve(self) -> list[str]:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == self.owner:
                    self.stop()
                elif key.fileobj is self.wakeup:
                    self.wakeup.recv(4096)
                    self.reap()
                elif key.fileobj is self.listener:
                    argv = self.accept()
                    if argv is not None:
                        return argv
                elif key.data in self.clients:  # the client was killed
                    self.forget(key.data)
                    os.kill(key.data, signal.SIGKILL)

    def accept(self) -> list[str] | None:
        """Fork a program for a new client; return its arguments in the program, and None in the server."""
        client, _ = self.listener.accept()
        size = array.array("i").itemsize * STREAMS
        head, rights, _, _ = client.recvmsg(LENGTH.size, socket.CMSG_SPACE(size))
        streams = array.array("i", rights[0][2][:size])
        task = json.loads(receive(client, *LENGTH.unpack(head)))
        pid = os.fork()
        if pid == 0:
            self.close_in_program(client)
            return prepare(task, streams)
        for stream in streams:
            os.close(stream)
        self.clients[pid] = client
        self.selector.register(client, selectors.EVENT_READ, pid)
        client.sendall(LENGTH.pack(pid))
        return None

    def close_in_program(self, *others: socket.socket) -> None:
        """Close everything that belongs to the server, in a forked program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        os.close(self.owner)
        for resource in (self.listener, self.wakeup, self.wakeup_sender, *self.clients.values(), *others):
            resource.close()

    def reap(self) -> None:
        with suppress(ChildProcessError):  # no child is left
            while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self.forget(*child)

    def forget(self, pid: int, status: int | None = None) -> None:
        client = self.clients.pop(pid, None)
        if client is None:
            return
        self.selector.unregister(client)
        with client, suppress(OSError):  # the client may have ended
            if status is not None:
                client.sendall(LENGTH.pack(status))

    def stop(self) -> None:
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def prepare(task: dict, streams: array.array) -> list[str]:
    """Make this fork look like a new interpreter: streams, environment, folder, import path, random state."""
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding = task["environ"].get("PYTHONIOENCODING", "utf-8")
    os.environ.clear()
    os.environ.update(task["environ"])
    os.chdir(task["folder"])
    sys.executable = task["executable"]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding)
    out, error = (io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)) for descriptor in (1, 2))
    sys.stdout = io.TextIOWrapper(out, encoding, line_buffering=os.isatty(1))
    sys.stderr = io.TextIOWrapper(error, encoding, "backslashreplace", line_buffering=True)
    python_path = [path for path in task["environ"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*python_path, *(path for path in sys.path[1:] if path not in python_path)]
    if "numpy" in sys.modules:  # the module `random` reseeds itself after a fork
        sys.modules["numpy"].random.seed()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # read TMPDIR again
    return task["argv"][task["argv"][0] == "-u" :]


def finish(argv: list[str]) -> None:
    """Run the program to its end and exit."""
    code: object = None
    sys.excepthook = fail
    try:
        execute(argv)
    except SystemExit as end:
        code = end.code
    if not (code is None or isinstance(code, int)):
        sys.stderr.write(f"{code}\n")
        code = 1
    exit_process(code or 0)


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    exit_process(1)


def exit_process(code: int) -> None:
    """Exit without tearing down the interpreter, which would take longer than many programs run."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def execute(argv: list[str]) -> None:
    """Run a module, code or a file, like `python ARGV`."""
    match argv:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(code, {"__name__": "__main__"})
        case [file, *_]:
            sys.argv = argv
            sys.path.insert(0, str(Path(file).resolve().parent))
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3:])
    server = Server(sys.argv[2], int(sys.argv[3]))
    if os.fork():  # clients may connect now; the server is not a child of the tests
        os._exit(0)
    sys.modules["ray"] = None  # vLLM works without it; Ray reads its settings when it is imported
    for name in sys.argv[4:]:
        importlib.import_module(name)
    del sys.modules["ray"]
    sys.stdout.flush()
    gc.freeze()  # a garbage collection in a program would copy every shared page
    finish(server.serve())
