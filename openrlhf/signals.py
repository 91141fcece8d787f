"""Every handler of Ctrl-C (SIGINT) and SIGTERM in the package.

A command passes through three phases. While it imports modules, a signal ends it immediately (`exit_on_signals`). While
it works, a signal raises KeyboardInterrupt (`interrupt_on_signals`), so a scheduler's SIGTERM is treated like a user's
Ctrl-C. While something runs that should end cleanly, an optimizer step or a chat reply, the first signal is only a
request to stop (`stop_request`), and a second Ctrl-C raises. Python delivers signals to the main thread only, so in any
other thread these functions do nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType

from openrlhf.monitor import is_main_process

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code by convention after Ctrl-C
SAVES = "\nopenrlhf: stopping after this step, with a checkpoint; press Ctrl-C again to stop immediately, without one"
SAVES_NOTHING = (
    "\nopenrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt);"
    " press Ctrl-C again to stop immediately"
)


def write_line(line: str) -> None:
    """Print a line to stderr from a signal handler; `print` is unsafe there, since the signal may interrupt one."""
    if is_main_process():
        os.write(STDERR, f"{line}\n".encode())


def exit_on_signals() -> None:
    """Exit immediately on either signal from now on, except inside the contexts below.

    There is nothing to clean up yet, and an exception may get lost: during an import it may be raised in a callback,
    where Python prints it and continues.
    """

    def end(number: int, frame: FrameType | None) -> None:
        write_line("openrlhf: interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is threading.main_thread():
        for number in not_ignored():
            signal.signal(number, end)


def not_ignored() -> list[signal.Signals]:
    """List the signals to handle: not those our parent made us ignore, as nohup and background jobs of shells do."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], object], signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Let `handler` handle the signals while the context is open, and restore the previous handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore our SIGTERM handler after code that installs its own, such as `ray.init`."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def interrupt_on_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on both signals while the context is open.

    The handler is Python's own, which `asyncio.run` recognises and replaces with one that cancels the running task.
    """
    return handled_by(signal.default_int_handler, not_ignored())


@dataclass
class StopRequest:
    """Whether the user or the scheduler asked to stop; loops check it where they can end cleanly."""

    requested: bool = False


@contextmanager
def stop_request(
    message: str | None = None,
    *,
    signals: Iterable[signal.Signals] = SIGNALS,
    error: type[KeyboardInterrupt] = KeyboardInterrupt,
) -> Iterator[StopRequest]:
    """Take the first signal as a request to stop, and print `message`; a second Ctrl-C raises `error` immediately.

    A SIGTERM after a Ctrl-C is not a second request: on Ctrl-C the `deepspeed` launcher sends SIGTERM to all processes,
    which have already received the Ctrl-C.
    """
    stop = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if not stop.requested:
            stop.requested = True
            if message is not None:
                write_line(message)
        elif number == signal.SIGINT:
            raise error

    with handled_by(note, signals):
        yield stop
