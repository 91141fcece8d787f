"""Ctrl-C and SIGTERM as a wish that the loop honours at its next safe place."""

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
    """Within it the first signal only sets `wished`; a second Ctrl-C interrupts at once, as without it.

    A SIGTERM behind a Ctrl-C is no second wish: the `deepspeed` launcher sends one to everybody who already heard.
    Signals reach only a program's main thread: in another one nothing is changed.
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
            os.write(STDERR, self.heard.encode())  # a print may be what the signal interrupted
