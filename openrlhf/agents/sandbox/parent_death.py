"""Process cleanup: a worker ends with its trainer, and the processes that the worker started end with the worker.

On Linux the kernel enforces this, even while user code holds the interpreter lock and no other Python code can run: the
trainer's death kills the worker, and the worker's death signals a small watcher process, which kills the rest of their
process group. On other systems a thread of the worker polls for the trainer's death.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h: ask the kernel for a signal when the parent of this process dies
POLL_SECONDS = 1.0


def die_with(parent: int) -> None:
    """Kill this worker's process group when the parent dies; call it first in a worker that leads its own group."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        worker = os.getpid()
        if os.fork() == 0:  # the watcher: waits for the worker's end, then kills the process group
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # inherited copies would keep the worker's pipes open
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            prctl(PR_SET_PDEATHSIG, int(signal.SIGUSR1))
            if os.getppid() == worker:
                signal.sigwait({signal.SIGUSR1})
            os.killpg(0, signal.SIGKILL)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_poll, args=(parent,), daemon=True, name="openrlhf-parent").start()
    if os.getppid() != parent:  # the parent died before the signal was set up
        os.killpg(0, signal.SIGKILL)


def _poll(parent: int) -> None:
    """Kill this process group once the parent has died."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
