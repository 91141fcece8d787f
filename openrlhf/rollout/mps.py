"""CUDA MPS: the processes that share a GPU run their kernels side by side, instead of one process after the other.

MPS is a daemon of NVIDIA's driver, to which a process connects when it initialises CUDA. `start_mps` starts one for the
engines that this process will start. This process is not a client: it takes turns with the engines on the GPU anyway,
and a fault of an MPS client ends all clients of its server. Clients cannot continue without the daemon, so it must
outlive this process, even if this process is killed. Therefore its parent is a small keeper process, which waits for
the end of this process, stops the daemon (`quit`) and removes its folder. The daemon runs in the foreground (-f), as a
child of the keeper, instead of detaching itself (-d).

This file also runs as a script, the keeper and a probe, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
USUAL_PIPES = Path("/tmp/nvidia-mps")  # CUDA's default for PIPES
DRIVER = "libcuda.so.1"
PROBE = "probe"  # argument of this script, in place of a process id
START_SECONDS = 10.0  # wait for the daemon to answer
POLL_SECONDS = 0.1
PROBE_SECONDS = 60.0  # wait for the first client, which starts the daemon's server
CHECK_SECONDS = 0.5  # seconds between checks that the process is still running
QUIT_SECONDS = 10.0  # wait for the daemon to end before it is killed


@dataclass(frozen=True)
class Clients:
    """How the processes that share a GPU become clients of MPS."""

    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables to set in the processes
    problem: str = ""  # why they cannot become clients; empty if they can


def start_mps() -> Clients:
    """Start a daemon for the processes that this one starts later, or return why that is not possible.

    If MPS is already running, or an earlier call started it, that daemon is used.
    """
    if PIPES in os.environ or (USUAL_PIPES.exists() and answers(os.environ)):
        return Clients()
    if not _started:
        _started.append(_start())
    return _started[0]


# The result of the first call: all runs of a notebook share the daemon, and a second attempt would fail again.
_started: list[Clients] = []
_keepers: list[subprocess.Popen[bytes]] = []  # keeps their pipes open while this process runs


def _start() -> Clients:
    if shutil.which(CONTROL) is None:
        return Clients(problem=f"{CONTROL} is not installed")
    # Let the daemon see all GPUs; otherwise clients would have to number them from the first one that it sees.
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        folder = tempfile.mkdtemp(prefix="openrlhf-mps-", dir="/tmp")  # short, because the paths of sockets are limited
        variables = {PIPES: folder, LOGS: folder}
        keeper = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid())],
            cwd="/",
            stdin=subprocess.PIPE,  # closes when this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the trainer
            env=environ | variables,
        )
    except OSError as error:
        return Clients(problem=f"{CONTROL} cannot start: {error}")
    _keepers.append(keeper)
    deadline = time.monotonic() + START_SECONDS
    while not (answering := answers(variables)) and time.monotonic() < deadline and keeper.poll() is None:
        time.sleep(POLL_SECONDS)
    if answering and serves(variables):
        return Clients(variables)
    problem = last_line(Path(folder) / "control.log") or "it does not answer"
    keeper.communicate(b"end")
    shutil.rmtree(folder, ignore_errors=True)
    return Clients(problem=f"{CONTROL} cannot start: {problem}")


def answers(variables: Mapping[str, str]) -> bool:
    """Return whether a daemon with these environment variables answers."""
    return tell("get_server_list", variables) == 0


def tell(command: str, variables: Mapping[str, str]) -> int | None:
    """Send the daemon a command; return the exit code, or None if it takes too long or cannot be sent."""
    try:
        return subprocess.run(
            [CONTROL],
            input=f"{command}\n".encode(),
            env=dict(os.environ) | dict(variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=QUIT_SECONDS,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


def serves(variables: Mapping[str, str]) -> bool:
    """Return whether a process can use CUDA through the daemon, which may answer even if its server cannot start."""
    command = [sys.executable, "-I", __file__, PROBE]
    with suppress(subprocess.TimeoutExpired):
        environ = dict(os.environ) | dict(variables)
        return subprocess.run(command, env=environ, timeout=PROBE_SECONDS, check=False).returncode == 0
    return False


def probe() -> bool:
    """Open a CUDA context in this separate process; return True if that works, or if there is no driver to test."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return True
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    return not (failed or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))


def last_line(log: Path) -> str:
    with suppress(OSError):
        return "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
    return ""


def keep(parent: int) -> None:
    """Run the daemon until the parent has ended, or writes to the pipe; then stop it and remove its folder.

    If the daemon ends first, so does the keeper; a parent that is still waiting for the start then reads the log.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    daemon = subprocess.Popen([CONTROL, "-f"], stdin=subprocess.DEVNULL, start_new_session=True)
    while os.getppid() == parent and not select.select([sys.stdin], [], [], CHECK_SECONDS)[0]:
        if daemon.poll() is not None:
            return
    tell("quit", os.environ)
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(QUIT_SECONDS)
    with suppress(ProcessLookupError):  # the daemon, if it did not end, and its server
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()
    shutil.rmtree(os.environ[PIPES], ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == PROBE:
        sys.exit(not probe())
    keep(int(sys.argv[1]))
