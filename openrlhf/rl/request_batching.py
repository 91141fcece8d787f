"""Concurrent episodes, and how their requests reach the engine.

`GroupRunner` (`rollouts.py`) gets one `EpisodeSession` per sample from an `EpisodeScheduler` and passes them to the
executor. An episode generates through its session. In lockstep, a request first waits for those of the other episodes:

    episode -> EpisodeSession.generate ----- waits -----> Engine.generate
                                               ^
                     advance: as soon as every running episode waits

The requests then reach the engine in the same iteration of the event loop, in the order of their episodes, and the
engine of this process makes one batch of them. Engines are fastest with large batches, and the batches depend only on
the episodes, so a run is reproducible. This also holds with a limit on episodes: which groups start before the next
batch depends on how many episodes have ended, not on which ended first.

Without lockstep, episodes do not wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from openrlhf.rl.rollout_times import RolloutTimes
from openrlhf.rollout.engine import Engine
from openrlhf.types import Completion, Request


class EpisodeScheduler:
    """Starts groups, at most `limit` episodes at a time, and in lockstep sends their requests together."""

    def __init__(self, engine: Engine, limit: int | None = None, *, lockstep: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.lockstep = lockstep
        self.times = RolloutTimes(engine)
        self.running = 0  # episodes
        self.numbers = count()  # numbers of the episodes, in the order of their groups
        # Groups that wait to start: their sessions, and the future that they await.
        self.queue: deque[tuple[list[EpisodeSession], asyncio.Future[None]]] = deque()
        self.waiting: dict[int, asyncio.Future[None]] = {}  # by episode: requests that wait for those of others

    @asynccontextmanager
    async def open_group(self, size: int, prefix: int = 0) -> AsyncIterator[list[EpisodeSession]]:
        """Yield the sessions of a group whose samples share the prompt `prefix`; at the end, close those still open.

        Groups start in the order of the calls, when the limit has room for all of a group, or when no other episode is
        running. From then on the group counts as running, so that no batch is sent before it has made its requests.
        """
        sessions = [EpisodeSession(self, next(self.numbers), prefix) for _ in range(size)]
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.append((sessions, started))
        started.get_loop().call_soon(self.advance)
        try:
            await started
            yield sessions
        finally:
            for session in sessions:
                session.close()

    def advance(self) -> None:
        """Start queued groups while the limit has room; in lockstep, send all requests once each episode has one.

        This function runs in the next iteration of the event loop after each change, by which time the other changes of
        that iteration, such as the requests of other episodes, are known.
        """
        while self.queue:
            sessions, started = self.queue[0]
            if self.limit is not None and self.running > 0 and self.running + len(sessions) > self.limit:
                break
            self.queue.popleft()
            if not started.done():  # otherwise it was cancelled
                self.running += len(sessions)
                for session in sessions:
                    session.start()
                started.set_result(None)
        if len(self.waiting) >= self.running:
            turns = [turn for _, turn in sorted(self.waiting.items())]  # in the order of their episodes
            self.waiting.clear()
            for turn in turns:
                if not turn.done():  # otherwise it was cancelled
                    turn.set_result(None)


@dataclass(eq=False)
class EpisodeSession:
    """One episode's access to the engine; close it when the episode makes no more requests."""

    scheduler: EpisodeScheduler
    episode: int
    prefix: int
    open: bool = False  # from its start until it is closed
    since: float = 0.0  # time of its start and, once closed, of its end

    def start(self) -> None:
        """Begin the episode."""
        self.open = True
        self.since = time.perf_counter()
        self.scheduler.times.generating.begin()

    async def generate(self, request: Request, *, last: bool = False) -> Completion:
        """Return the completion of a request, and close the session after the last one.

        Cancelling the call cancels the request.
        """
        assert self.open, "an episode requested tokens after it had ended"
        scheduler = self.scheduler
        assert self.episode not in scheduler.waiting, "an episode makes one request at a time"
        scheduler.times.requesting.begin()
        try:
            if scheduler.lockstep:  # wait until every running episode has a request
                loop = asyncio.get_running_loop()
                turn = scheduler.waiting[self.episode] = loop.create_future()
                loop.call_soon(scheduler.advance)
                await turn
            request = replace(request, prefix=self.prefix, episode=self.episode)
            (completion,) = await scheduler.engine.generate([request])
            return completion
        finally:
            scheduler.waiting.pop(self.episode, None)  # if it was cancelled
            scheduler.times.requesting.end()
            if last:
                self.close()

    def close(self) -> None:
        """End the episode; this may start a queued group, or send the requests of the other episodes."""
        if self.open:
            self.open = False
            now = time.perf_counter()
            self.scheduler.times.samples.append(now - self.since)
            self.scheduler.times.generating.end()
            self.since = now
            self.scheduler.running -= 1
            asyncio.get_running_loop().call_soon(self.scheduler.advance)
