"""Measure how long something is in use, when activities may overlap."""

from __future__ import annotations

import time


class UsageClock:
    """Clock that runs while at least one activity is in progress."""

    def __init__(self) -> None:
        self.running = 0  # activities
        self.total = 0.0  # seconds, up to the end of the last period
        self.since = 0.0  # beginning of the current period

    def begin(self) -> None:
        if self.running == 0:
            self.since = time.perf_counter()
        self.running += 1

    def end(self) -> None:
        self.running -= 1
        if self.running == 0:
            self.total += time.perf_counter() - self.since

    @property
    def seconds(self) -> float:
        """Seconds in use so far."""
        return self.total + (time.perf_counter() - self.since if self.running else 0.0)
