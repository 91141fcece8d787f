"""Process cleanup: a worker ends with its trainer, and every process that the worker started ends with the worker.

On Linux the kernel enforces this, even while user code holds the interpreter lock and no other Python code can run. The
process that the trainer starts becomes a supervisor, and its child becomes the worker. Orphans become children of the
supervisor, so a daemon in its own session cannot escape:

    trainer's death or SIGTERM  ->  supervisor kills all its descendants  ->  exits with the worker's status
    worker's death              ->

On other systems a thread of the worker polls for the trainer's death and kills the process group.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from openrlhf.agents.sandbox.descendants import adopt_orphans, kill_descendants

PR_SET_PDEATHSIG = 1  # linux/prctl.h: ask the kernel for a signal when the parent of this process dies
POLL_SECONDS = 1.0


def die_with(parent: int) -> None:
    """Kill this worker and its children when the parent dies; call it first in a worker that leads a process group."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        supervisor = os.getpid()
        worker = os.fork()
        if worker != 0:
            prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
            _supervise(worker, parent)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        parent = supervisor
    else:
        threading.Thread(target=_poll, args=(parent,), daemon=True, name="openrlhf-parent").start()
    if os.getppid() != parent:  # the parent died before the signal was set up
        end_all()


def end_all() -> None:
    """End this worker and everything that it started."""
    if sys.platform == "linux":
        os.kill(os.getpid(), signal.SIGKILL)  # the supervisor kills the rest
    else:
        os.killpg(0, signal.SIGKILL)


def _supervise(worker: int, parent: int) -> NoReturn:
    """Wait for the end of the worker or for SIGTERM, kill all descendants, and exit with the status of the worker."""
    adopt_orphans()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # inherited copies would keep the worker's pipes open
    code: int | None = None
    while code is None and os.getppid() == parent:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            break
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:  # also reaps orphans
                if ended[0] == worker:
                    code = os.waitstatus_to_exitcode(ended[1])
    killed = kill_descendants()
    if code is None:
        code = killed.get(worker, -signal.SIGKILL)  # the worker may have ended just before SIGTERM
    if code >= 0:
        os._exit(code)
    cause = signal.Signals(-code)
    if cause != signal.SIGKILL:
        signal.signal(cause, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {cause})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped core already
    os.kill(os.getpid(), cause)
    os._exit(1)  # not reached, unless the signal is ignored


def _poll(parent: int) -> None:
    """Kill this process group once the parent has died."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
