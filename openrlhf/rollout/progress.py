"""Watchdog of an engine: ends the wait for an engine that makes no progress, such as one stuck in a GPU kernel.

The engine's thread records its task and the time of its last progress (a token or a finished command). The watchdog's
thread checks this periodically. It cannot interrupt the engine's thread, so the owner decides how to react to a stall:
vLLM's callers get an EngineError (`command_thread.py`), and the in-process engine ends the program (`hf.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openrlhf.errors import RESUME

LOOKS = 10  # checks per time limit
SLOWEST = 60.0  # maximum seconds between two checks
AFTER_STALL = f"{RESUME}, or a larger --engine_timeout"


class ProgressWatch:
    """Watchdog that calls `on_stall` once, with a description, if a task makes no progress for `seconds`."""

    def __init__(self, seconds: float, on_stall: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.on_stall = on_stall
        self._task: str | None = None  # None while there is nothing to do
        self._progress_at = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="openrlhf-progress").start()

    @contextmanager
    def working(self, task: str) -> Iterator[None]:
        """Watch a task while the context is open; the time is measured from the last call of `progress`."""
        self._task = task
        try:
            yield
        finally:
            self._task = None

    def progress(self) -> None:
        """Restart the clock: call it after each token, and before and after a task that produces no tokens."""
        self._progress_at = time.monotonic()

    def stop_clock(self) -> None:
        """Stop watching the current task, because its remaining work has its own deadlines."""
        self._task = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self.seconds / LOOKS, SLOWEST)):
            task, silent = self._task, time.monotonic() - self._progress_at
            if task is not None and silent > self.seconds:
                self.on_stall(f"no progress for {silent:.0f} s (--engine_timeout {self.seconds:g}) while {task}")
                return
