"""Handling of Ctrl-C and SIGTERM in commands.

While a command is only importing modules, it exits immediately; inside `at_work`, both signals raise KeyboardInterrupt.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code by convention after Ctrl-C


def end_at_once() -> None:
    """Exit immediately on either signal, except inside `at_work`.

    There is nothing to clean up, and an exception may get lost: during an import it may be raised in a callback, where
    Python prints it and continues.
    """
    if threading.current_thread() is threading.main_thread():
        for number in heard():
            signal.signal(number, _end)


def heard() -> list[signal.Signals]:
    """List the signals to handle: not those our parent made us ignore, as nohup and background jobs of shells do."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":  # only the main process prints
        os.write(STDERR, b"openrlhf: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def at_work() -> Iterator[None]:
    """Raise KeyboardInterrupt on both signals, so that a scheduler's SIGTERM is treated like a user's Ctrl-C.

    Only the main thread can install signal handlers; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
