"""Timeouts that count only the time of user code.

The deadline of a call excludes time spent waiting for the engine, and time in which another call of the same worker
process blocks its event loop. Each `WorkerProcess` has a `LoopUsage`, which it updates from the worker's reports, and a
`Deadline` for each of its calls.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class LoopUsage:
    """The call that is running on a worker's event loop, and the running time of each call so far.

    Times are in seconds of the trainer's event-loop clock.
    """

    running: int | None = None
    since: float = 0.0  # when `running` last changed
    total: float = 0.0  # running time of all calls, up to `since`
    by_call: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def switch(self, call: int | None, now: float) -> None:
        """Record that `call` starts running now; None means that no call is running."""
        if self.running is not None:
            self.total += now - self.since
            self.by_call[self.running] += now - self.since
        self.running, self.since = call, now

    def used_by_others(self, call: int, now: float) -> float:
        """Return the total time in seconds for which calls other than `call` have run."""
        ongoing = now - self.since if self.running not in (None, call) else 0.0
        return self.total - self.by_call[call] + ongoing


class Deadline:
    """Timer that calls `expire` once a call's user code has run for `seconds` since the engine last answered."""

    def __init__(self, call: int, seconds: float, usage: LoopUsage, expire: Callable[[], None]) -> None:
        self.call, self.seconds, self.usage, self.expire = call, seconds, usage, expire
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.pauses = 1  # open requests to the engine; 1 at first, so that resume() starts the clock
        self.resume()

    def pause(self) -> None:
        """Stop the clock while a request to the engine is open; requests may overlap."""
        self.pauses += 1
        self.stop()

    def resume(self) -> None:
        """Record that the engine answered; if no request is pending any longer, restart the full time limit."""
        self.pauses -= 1
        if self.pauses == 0:
            self.started = self.loop.time()
            self.used_before = self.usage.used_by_others(self.call, self.started)
            self.timer = self.loop.call_later(self.seconds, self._check)

    def stop(self) -> None:
        """Cancel the timer; after `pause`, `resume` starts it again."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self) -> None:
        """Expire if the call itself has used up its time; otherwise set the timer to the remaining time."""
        now = self.loop.time()
        used_by_others = self.usage.used_by_others(self.call, now) - self.used_before
        left = self.seconds - (now - self.started - used_by_others)
        if left <= 0:
            self.expire()
        else:
            # Wait at least 1% of the limit: `left` does not shrink while another call runs, so this would busy-loop.
            self.timer = self.loop.call_later(max(left, self.seconds / 100), self._check)
