"""Time as it is charged to user code: waiting for the engine, or for a neighbour that holds the processor, is free."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Processor:
    """Who has a worker's processor, and how long each call has had it."""

    running: int | None = None
    since: float = 0.0
    total: float = 0.0
    by_call: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def switch(self, call: int | None, now: float) -> None:
        if self.running is not None:
            self.total += now - self.since
            self.by_call[self.running] += now - self.since
        self.running, self.since = call, now

    def used_by_others(self, call: int, now: float) -> float:
        ongoing = now - self.since if self.running not in (None, call) else 0.0
        return self.total - self.by_call[call] + ongoing


class Deadline:
    """Tells when a call's user code has run for longer than it may since the engine last answered."""

    def __init__(self, call: int, seconds: float, processor: Processor, expire: Callable[[], None]) -> None:
        self.call, self.seconds, self.processor, self.expire = call, seconds, processor, expire
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.pauses = 0
        self._start()

    def pause(self) -> None:
        self.pauses += 1
        self.stop()

    def resume(self) -> None:
        """The engine answered; when nothing more is asked of it, the time begins anew."""
        self.pauses -= 1
        if self.pauses == 0:
            self._start()

    def _start(self) -> None:
        self.started = self.loop.time()
        self.free = self.processor.used_by_others(self.call, self.started)
        self.timer = self.loop.call_later(self.seconds, self._check)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self) -> None:
        now = self.loop.time()
        others = self.processor.used_by_others(self.call, now) - self.free
        left = self.seconds - (now - self.started - others)
        if left <= 0:
            self.expire()
        else:
            # At least a hundredth: while a neighbour holds the processor, `left` stands still.
            self.timer = self.loop.call_later(max(left, self.seconds / 100), self._check)
