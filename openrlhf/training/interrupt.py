"""Ctrl-C and SIGTERM as a request that the training loops check after each step, so that they can save first."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from openrlhf.monitor import is_main_process

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HEARD = "\nopenrlhf: stopping after this step, with a checkpoint; Ctrl-C once more stops at once, without\n"
UNSAVED = "\nopenrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt); Ctrl-C again: at once\n"


class Interrupt:
    """Context manager: the first signal only sets `wished`; a second Ctrl-C raises KeyboardInterrupt immediately.

    A SIGTERM after a Ctrl-C is not a second request: on Ctrl-C the `deepspeed` launcher sends SIGTERM to all processes,
    which have already received the Ctrl-C. Python delivers signals only to the main thread, so in any other thread this
    does nothing.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.wished = False
        self.heard = HEARD if saves else UNSAVED
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wished and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.wished:
            return
        self.wished = True
        if is_main_process():
            os.write(STDERR, self.heard.encode())  # not print, which the signal may have interrupted
