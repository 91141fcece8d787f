"""Concurrent episodes, and how their requests are batched for the engine.

In lockstep, requests are sent together as soon as every running episode waits for one. Engines are fastest with bulk
admission, and the batches depend only on the episodes, so a run repeats exactly. This also holds with a limit on
episodes: which groups start before the next turn depends on how many episodes have ended, not on which ended first.

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
class Waiting:
    """A request, and the future that its episode awaits."""

    number: int  # of the episode
    request: Request
    answer: asyncio.Future[Completion]


class Turnstile:
    """Batches the requests of concurrent episodes, and limits how many episodes run.

    In lockstep it sends a batch when no running episode is left that could still add to it.
    """

    def __init__(self, engine: Engine, limit: int | None = None, *, lockstep: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.lockstep = lockstep
        self.alive = 0
        self.begun = 0
        self.line: deque[tuple[int, int, asyncio.Future[list[Session]]]] = deque()  # groups that wait to start
        self.waiting: list[Waiting] = []
        self.turns: set[asyncio.Future[list[Completion]]] = set()  # references, so that they are not collected

    def line_up(self, size: int, prefix: int = 0) -> asyncio.Future[list[Session]]:
        """Return a future of the sessions of a group whose samples share the prompt `prefix`.

        The group starts when the limit has room for all of it, or when no other episode is running. From then on it
        counts as alive, so that no batch is sent before it has made its requests.
        """
        door: asyncio.Future[list[Session]] = asyncio.get_running_loop().create_future()
        self.line.append((size, prefix, door))
        self._admit()
        return door

    def _admit(self) -> None:
        """Start waiting groups in order, while the limit has room for the first of them."""
        while self.line and self._has_room(self.line[0][0]):
            size, prefix, door = self.line.popleft()
            if not door.done():  # otherwise it was cancelled
                door.set_result([Session(self, number, prefix) for number in range(self.begun, self.begun + size)])
                self.begun += size
                self.alive += size

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.alive == 0 or self.alive + size <= self.limit

    async def ask(self, number: int, request: Request) -> Completion:
        """Return the completion of an episode's request, which waits for its batch."""
        entry = Waiting(number, request, asyncio.get_running_loop().create_future())
        self.waiting.append(entry)
        self.turn_if_ready()
        try:
            return await entry.answer
        finally:
            if entry in self.waiting:  # the episode was cancelled before its batch was sent
                self.waiting.remove(entry)

    def leave(self) -> None:
        """End an episode, which may let a group start or complete the batch of the others."""
        self.alive -= 1
        self._admit()
        self.turn_if_ready()

    def turn_if_ready(self) -> None:
        """Send a batch if all running episodes wait; without lockstep, schedule one."""
        if self.lockstep and self.waiting and len(self.waiting) == self.alive:
            self._turn(self._taken())
        elif not self.lockstep and len(self.waiting) == 1:  # the first request schedules the batch
            asyncio.get_running_loop().call_soon(self._turn_by_prefix)

    def _taken(self) -> list[Waiting]:
        """Take all waiting requests, in the order of their episodes."""
        batch = sorted(self.waiting, key=lambda entry: entry.number)
        self.waiting.clear()
        return batch

    def _turn_by_prefix(self) -> None:
        """Send the waiting requests, one batch per prompt."""
        for _, batch in groupby(self._taken(), key=lambda entry: entry.request.prefix):
            self._turn(list(batch))

    def _turn(self, batch: list[Waiting]) -> None:
        turn = asyncio.ensure_future(self.engine.generate([entry.request for entry in batch]))
        self.turns.add(turn)
        turn.add_done_callback(partial(self._answer, batch))

    def _answer(self, batch: list[Waiting], turn: asyncio.Future[list[Completion]]) -> None:
        """Pass the outcome of a batch to all that still wait for it: completions, an error or a cancellation."""
        self.turns.discard(turn)
        waiting = [(place, entry.answer) for place, entry in enumerate(batch) if not entry.answer.done()]
        if turn.cancelled():
            for _, answer in waiting:
                answer.cancel()
        elif error := turn.exception():
            for _, answer in waiting:
                answer.set_exception(error)
        else:
            for place, answer in waiting:
                answer.set_result(turn.result()[place])


class Session:
    """One episode's access to the engine; close it when the episode makes no more requests."""

    def __init__(self, turnstile: Turnstile, number: int, prefix: int) -> None:
        self.turnstile = turnstile
        self.number = number
        self.prefix = prefix
        self.open = True

    async def generate(self, request: Request) -> Completion:
        assert self.open, "an episode that has ended asked for more tokens"
        return await self.turnstile.ask(self.number, replace(request, prefix=self.prefix))

    def close(self) -> None:
        if self.open:
            self.open = False
            self.turnstile.leave()
