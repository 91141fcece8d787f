"""Python processes that the trainer starts and exchanges messages with: start them, frame messages, end them.

Engines (`rollout/engine_process.py`) and workers for user code (`agents/sandbox/process.py`) run in such processes.
Each has its own session: Ctrl-C in the terminal reaches only the trainer, which can kill the whole process group.
Messages travel over socket pairs as frames: bytes preceded by their length. The two ends choose the encoding: engines
run only our own code and exchange pickles; workers run user code and answer in JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

LENGTH = struct.Struct("!Q")
PR_SET_PDEATHSIG = 1  # linux/prctl.h: ask the kernel for a signal when the parent of this process dies


def python_command(code: str) -> list[str]:
    """Return the command that runs Python code with this process's import path."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {json.dumps(sys.path)}; {code}"]


async def start_python(
    code: str,
    *,
    environment: Mapping[str, str],
    stdin: int,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Run Python code in a new process and session, with this process's import path."""
    return await asyncio.create_subprocess_exec(
        *python_command(code),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        env=environment,
    )


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that started it; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def frame(data: bytes) -> bytes:
    """Return the data preceded by its length, as `read_frames` expects it."""
    return LENGTH.pack(len(data)) + data


async def read_frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each frame until the other end is gone."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            yield await reader.readexactly(length)


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended, but whose id has not been reused.

    `Process.send_signal` would poll, and take the exit code away from asyncio's own wait.
    """
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process and everything in its process group; its id must not have been reused."""
    with suppress(ProcessLookupError, PermissionError):  # macOS denies signals to a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Say how a process ended, from its exit code, which is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
