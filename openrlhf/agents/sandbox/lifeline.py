"""Process cleanup: a worker ends with its trainer, and the processes that the worker started end with the worker.

On Linux the kernel enforces this, even while user code holds the interpreter lock and no other Python code can run: the
trainer's death kills the worker, and the worker's death signals a small watcher process, which kills the rest of their
process group. On other systems the worker notices that its pipe was closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Tie this worker's life to its parent; call it first in a worker, which must lead its own process group."""
    if sys.platform == "linux":
        worker = os.getpid()
        if os.fork() == 0:
            _follow(worker)
        _signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the signal was set up
        end_group()


def end_group() -> None:
    """Kill this process and its process group."""
    os.killpg(0, signal.SIGKILL)


def _follow(worker: int) -> None:
    """Wait in the watcher process for the worker's end, then kill the process group."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # an inherited copy would keep the worker's pipe open after its end
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _signal_when_parent_dies(signal.SIGUSR1)
    if os.getppid() == worker:
        signal.sigwait({signal.SIGUSR1})
    end_group()


def _signal_when_parent_dies(number: signal.Signals) -> None:
    """Ask the Linux kernel to send this process a signal when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
