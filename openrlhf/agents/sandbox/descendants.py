"""Kill all processes that a process started, including daemons that left its process group.

A subreaper (Linux) becomes the parent of its orphaned descendants, so none of them can escape to process 1. Other
systems have no such mechanism; there, only process groups are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the new parent of all descendants whose parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def list_descendants() -> list[int]:
    """Return the process ids of all descendants of this process, from the process table."""
    children: dict[int, list[int]] = {}
    with suppress(FileNotFoundError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])  # the name in brackets may contain spaces
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill_descendants() -> dict[int, int]:
    """Kill and reap all descendants of this process, which must have called `adopt_orphans`; return their exit codes.

    All are stopped before they are killed, so that none can start another process during the search.
    """
    codes: dict[int, int] = {}
    while True:
        stopped: set[int] = set()
        while remaining := [pid for pid in list_descendants() if pid not in stopped]:
            for pid in remaining:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGSTOP)
            stopped.update(remaining)
        for pid in stopped:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
            while pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
