"""How a command hears Ctrl-C and SIGTERM: while it only loads modules it ends at once, at work it is interrupted."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended


def end_at_once() -> None:
    """But for `at_work`. There is nothing to tidy up, and an exception would not always be heard: amid an import it may
    be raised in a callback, where Python prints it and goes on."""
    if threading.current_thread() is threading.main_thread():
        for number in heard():
            signal.signal(number, _end)


def heard() -> list[signal.Signals]:
    """Without those that whoever started us had us ignore, as nohup and shells do for what runs in the background."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":  # the one that speaks
        os.write(STDERR, b"openrlhf: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def at_work() -> Iterator[None]:
    """Within it both are a KeyboardInterrupt, so that a scheduler's polite request to end is heard as a person's.

    Only a program's main thread may arrange it.
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
