"""Concurrent episodes, and how their requests are batched for the engine.

`run_groups` asks an `EpisodeScheduler` for one `EpisodeSession` per sample and gives the sessions to the executor. An
episode generates through its session; the scheduler collects requests and sends them to the engine in batches:

    episode -> EpisodeSession.generate -> EpisodeScheduler.generate -> pending -> _send -> Engine.generate
       ^                                                                                        |
       +-----------------------------------------  _deliver  <----------------------------------+

In lockstep, a batch is sent as soon as every running episode waits for one. Engines are fastest with bulk admission,
and the batches depend only on the episodes, so a run repeats exactly. This also holds with a limit on episodes: which
groups start before the next batch depends on how many episodes have ended, not on which ended first.

Without lockstep, episodes do not wait for each other: the requests that the samples of a prompt make in the same
iteration of the event loop form one batch, for the engine that has the prompt in its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from openrlhf.rollout.engine import Engine
from openrlhf.types import Completion, Request


@dataclass
class PendingRequest:
    """A request, and the future that its episode awaits."""

    episode: int
    request: Request
    answer: asyncio.Future[Completion]


@dataclass
class QueuedGroup:
    """A group that waits to start: its number of samples, its prompt, and the future of its sessions."""

    size: int
    prefix: int
    sessions: asyncio.Future[list[EpisodeSession]]


class EpisodeScheduler:
    """Starts groups of episodes, at most `limit` episodes at a time, and batches the requests of the running ones."""

    def __init__(self, engine: Engine, limit: int | None = None, *, lockstep: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.lockstep = lockstep
        self.running = 0  # episodes
        self.started = 0  # episodes, ever
        self.queue: deque[QueuedGroup] = deque()
        self.pending: list[PendingRequest] = []
        self.batches: set[asyncio.Future[list[Completion]]] = set()  # references, so that they are not collected

    def open_group(self, size: int, prefix: int = 0) -> asyncio.Future[list[EpisodeSession]]:
        """Return a future of the sessions of a group whose samples share the prompt `prefix`.

        The group starts when the limit has room for all of it, or when no other episode is running. From then on it
        counts as running, so that no batch is sent before it has made its requests.
        """
        sessions: asyncio.Future[list[EpisodeSession]] = asyncio.get_running_loop().create_future()
        self.queue.append(QueuedGroup(size, prefix, sessions))
        self._start_groups()
        return sessions

    def _start_groups(self) -> None:
        """Start queued groups in order, while the limit has room for the first of them."""
        while self.queue:
            group = self.queue[0]
            if self.limit is not None and self.running > 0 and self.running + group.size > self.limit:
                return
            self.queue.popleft()
            if not group.sessions.done():  # otherwise it was cancelled
                numbers = range(self.started, self.started + group.size)
                group.sessions.set_result([EpisodeSession(self, number, group.prefix) for number in numbers])
                self.started += group.size
                self.running += group.size

    async def generate(self, episode: int, request: Request) -> Completion:
        """Return the completion of an episode's request, which waits for its batch."""
        entry = PendingRequest(episode, request, asyncio.get_running_loop().create_future())
        self.pending.append(entry)
        self._send_if_ready()
        try:
            return await entry.answer
        finally:
            if entry in self.pending:  # the episode was cancelled before its batch was sent
                self.pending.remove(entry)

    def end_episode(self) -> None:
        """Count an episode as ended, which may let a group start or complete the batch of the others."""
        self.running -= 1
        self._start_groups()
        self._send_if_ready()

    def _send_if_ready(self) -> None:
        """Send a batch if all running episodes wait; without lockstep, schedule one."""
        if self.lockstep and self.pending and len(self.pending) == self.running:
            self._send(self._take_pending())
        elif not self.lockstep and len(self.pending) == 1:  # the first request schedules the batch
            asyncio.get_running_loop().call_soon(self._send_by_prompt)

    def _take_pending(self) -> list[PendingRequest]:
        """Take all pending requests, in the order of their episodes."""
        batch = sorted(self.pending, key=lambda entry: entry.episode)
        self.pending.clear()
        return batch

    def _send_by_prompt(self) -> None:
        """Send the pending requests, one batch per prompt."""
        for _, batch in groupby(self._take_pending(), key=lambda entry: entry.request.prefix):
            self._send(list(batch))

    def _send(self, batch: list[PendingRequest]) -> None:
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


class EpisodeSession:
    """One episode's access to the engine; close it when the episode makes no more requests."""

    def __init__(self, scheduler: EpisodeScheduler, episode: int, prefix: int) -> None:
        self.scheduler = scheduler
        self.episode = episode
        self.prefix = prefix
        self.open = True

    async def generate(self, request: Request) -> Completion:
        assert self.open, "an episode that has ended asked for more tokens"
        return await self.scheduler.generate(self.episode, replace(request, prefix=self.prefix))

    def close(self) -> None:
        if self.open:
            self.open = False
            self.scheduler.end_episode()
