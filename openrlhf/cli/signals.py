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
    """Until `at_work`. There is nothing to tidy up yet, and an exception would not always be heard: amid an import it
    may be raised in a callback, where Python prints it and goes on."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _end)


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
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
