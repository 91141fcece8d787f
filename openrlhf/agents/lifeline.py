"""No process outlives its purpose: a worker ends with its trainer, and what the worker started ends with the worker.

On Linux the kernel sees to it, also while user code holds the interpreter and no Python runs: the trainer's death kills
the worker, and the worker's death wakes a small process beside it that kills the rest of their group. Elsewhere the
worker notices that its pipe was closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """To be called first thing in a worker, which leads a process group of its own."""
    if sys.platform == "linux":
        worker = os.getpid()
        if os.fork() == 0:
            _follow(worker)
        _signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:  # gone before we asked
        end_group()


def end_group() -> None:
    """This process and everything that was started from it."""
    os.killpg(0, signal.SIGKILL)


def _follow(worker: int) -> None:
    """Waits for the worker's end in a process that does nothing else."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or the worker's pipe would not close with the worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _signal_when_parent_dies(signal.SIGUSR1)
    if os.getppid() == worker:
        signal.sigwait({signal.SIGUSR1})
    end_group()


def _signal_when_parent_dies(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
