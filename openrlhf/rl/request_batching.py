"""Concurrent episodes, and how their requests reach the engine.

`start_group` gets one `EpisodeSession` per sample from an `EpisodeScheduler` and passes them to the executor. An
episode generates through its session. In lockstep, the scheduler collects requests and sends them in batches:

    episode -> EpisodeSession.generate -> pending -> EpisodeScheduler.send_if_ready -> Engine.generate
       ^                                                                                    |
       +---------------------------------------  _deliver  <--------------------------------+

A batch is sent as soon as every running episode has a request. Engines are fastest with large batches, and the batches
depend only on the episodes, so a run is reproducible. This also holds with a limit on episodes: which groups start
before the next batch depends on how many episodes have ended, not on which ended first.

Without lockstep, episodes do not wait for each other: each request goes to the engine by itself, and its episode
continues as soon as it is finished.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from openrlhf.rl.rollout_times import RolloutTimes
from openrlhf.rollout.engine import Engine
from openrlhf.types import Completion, Request


@dataclass(eq=False)
class PendingRequest:
    """A request, and the future that its episode awaits."""

    episode: int
    request: Request
    answer: asyncio.Future[Completion]


class EpisodeScheduler:
    """Scheduler that starts groups of episodes, at most `limit` at a time, and in lockstep batches their requests."""

    def __init__(self, engine: Engine, limit: int | None = None, *, lockstep: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.lockstep = lockstep
        self.times = RolloutTimes(engine)
        self.running = 0  # episodes
        self.numbers = count()  # numbers of the episodes, in the order of their groups
        # Groups that wait to start: their sessions, and the future that returns them.
        self.queue: deque[tuple[list[EpisodeSession], asyncio.Future[list[EpisodeSession]]]] = deque()
        self.pending: list[PendingRequest] = []
        self.batches: set[asyncio.Future[list[Completion]]] = set()  # keeps the futures from being garbage-collected

    def open_group(self, size: int, prefix: int = 0) -> asyncio.Future[list[EpisodeSession]]:
        """Return a future of the sessions of a group whose samples share the prompt `prefix`.

        The group starts when the limit has room for all of it, or when no other episode is running. From then on it
        counts as running, so that no batch is sent before it has made its requests.
        """
        sessions = [EpisodeSession(self, next(self.numbers), prefix) for _ in range(size)]
        started: asyncio.Future[list[EpisodeSession]] = asyncio.get_running_loop().create_future()
        self.queue.append((sessions, started))
        self.start_groups()
        return started

    def start_groups(self) -> None:
        """Start queued groups in order, while the limit has room for the first of them."""
        while self.queue:
            sessions, started = self.queue[0]
            if self.limit is not None and self.running > 0 and self.running + len(sessions) > self.limit:
                return
            self.queue.popleft()
            if not started.done():  # otherwise it was cancelled
                self.running += len(sessions)
                for session in sessions:
                    session.start()
                started.set_result(sessions)

    def send_if_ready(self) -> None:
        """In lockstep, send the pending requests as one batch, in the order of their episodes, once all episodes wait.

        Sessions schedule this function for the next iteration of the event loop, by which time the other requests of
        this iteration are pending too.
        """
        if not self.pending or len(self.pending) < self.running:
            return
        batch = sorted(self.pending, key=lambda entry: entry.episode)
        self.pending.clear()
        completions = asyncio.ensure_future(self.engine.generate([entry.request for entry in batch]))
        self.batches.add(completions)
        completions.add_done_callback(partial(self._deliver, batch))

    def _deliver(self, batch: list[PendingRequest], completions: asyncio.Future[list[Completion]]) -> None:
        """Pass the outcome of a batch (completions, an error or a cancellation) to all callers still waiting for it."""
        self.batches.discard(completions)
        waiting = [(place, entry.answer) for place, entry in enumerate(batch) if not entry.answer.done()]
        if completions.cancelled():
            for _, answer in waiting:
                answer.cancel()
        elif error := completions.exception():
            for _, answer in waiting:
                answer.set_exception(error)
        else:
            for place, answer in waiting:
                answer.set_result(completions.result()[place])


@dataclass(eq=False)
class EpisodeSession:
    """One episode's access to the engine; close it when the episode makes no more requests."""

    scheduler: EpisodeScheduler
    episode: int
    prefix: int
    open: bool = True
    since: float = 0.0  # time of its start and, once closed, of its end

    def start(self) -> None:
        """Note the start of the episode."""
        self.since = time.perf_counter()
        self.scheduler.times.generating.begin()

    async def generate(self, request: Request) -> Completion:
        """Return the completion of a request; cancelling the call cancels the request, except in lockstep."""
        assert self.open, "an episode requested tokens after it had ended"
        request = replace(request, prefix=self.prefix, episode=self.episode)
        times = self.scheduler.times
        times.requesting.begin()
        try:
            return await self._send(request)
        finally:
            times.requesting.end()

    async def _send(self, request: Request) -> Completion:
        if not self.scheduler.lockstep:
            (completion,) = await self.scheduler.engine.generate([request])
            return completion
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        entry = PendingRequest(self.episode, request, answer)
        self.scheduler.pending.append(entry)
        asyncio.get_running_loop().call_soon(self.scheduler.send_if_ready)
        try:
            return await answer
        finally:
            if entry in self.scheduler.pending:  # the episode was cancelled before its batch was sent
                self.scheduler.pending.remove(entry)

    def close(self) -> None:
        """End the episode; this may start a queued group, or send the batch of the other episodes."""
        if self.open:
            self.open = False
            now = time.perf_counter()
            self.scheduler.times.samples.append(now - self.since)
            self.scheduler.times.generating.end()
            self.since = now
            self.scheduler.running -= 1
            self.scheduler.start_groups()
            asyncio.get_running_loop().call_soon(self.scheduler.send_if_ready)
