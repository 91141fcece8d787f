"""Episodes side by side. In lockstep, whenever every living one waits for the engine, their requests go to it at once.

Bulk admission is what engines are fast at, and the batches depend on nothing but the episodes: a run repeats exactly.
That holds under a limit too: who may begin before the next turn depends on how many have ended, never on who was first.

Out of step nobody waits for others: what the samples of a prompt ask in the same moment is one batch, for the engine
that has their prompt in its cache.
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
    """A request and who asked for it."""

    number: int
    request: Request
    answer: asyncio.Future[Completion]


class Turnstile:
    """Lets requests through when nobody is left who could still add one."""

    def __init__(self, engine: Engine, limit: int | None = None, *, lockstep: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.lockstep = lockstep
        self.alive = 0
        self.begun = 0
        self.line: deque[tuple[int, int, asyncio.Future[list[Session]]]] = deque()  # groups that wait to begin
        self.waiting: list[Waiting] = []
        self.turns: set[asyncio.Future[list[Completion]]] = set()  # kept, or they might be collected

    def line_up(self, size: int, prefix: int = 0) -> asyncio.Future[list[Session]]:
        """Sessions of a group that begins alike, as soon as the limit has room for all of them, or nobody else is left.

        A group that finds room counts as alive at once: no turn is made before it has asked.
        """
        door: asyncio.Future[list[Session]] = asyncio.get_running_loop().create_future()
        self.line.append((size, prefix, door))
        self._admit()
        return door

    def _admit(self) -> None:
        while self.line and self._has_room(self.line[0][0]):
            size, prefix, door = self.line.popleft()
            if not door.done():  # else it was called off
                door.set_result([Session(self, number, prefix) for number in range(self.begun, self.begun + size)])
                self.begun += size
                self.alive += size

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.alive == 0 or self.alive + size <= self.limit

    async def ask(self, number: int, request: Request) -> Completion:
        entry = Waiting(number, request, asyncio.get_running_loop().create_future())
        self.waiting.append(entry)
        self.turn_if_ready()
        try:
            return await entry.answer
        finally:
            if entry in self.waiting:  # its episode was given up
                self.waiting.remove(entry)

    def leave(self) -> None:
        self.alive -= 1
        self._admit()
        self.turn_if_ready()

    def turn_if_ready(self) -> None:
        if self.lockstep and self.waiting and len(self.waiting) == self.alive:
            self._turn(self._taken())
        elif not self.lockstep and len(self.waiting) == 1:  # the first of this moment calls for them all
            asyncio.get_running_loop().call_soon(self._turn_by_prefix)

    def _taken(self) -> list[Waiting]:
        batch = sorted(self.waiting, key=lambda entry: entry.number)
        self.waiting.clear()
        return batch

    def _turn_by_prefix(self) -> None:
        for _, batch in groupby(self._taken(), key=lambda entry: entry.request.prefix):
            self._turn(list(batch))

    def _turn(self, batch: list[Waiting]) -> None:
        turn = asyncio.ensure_future(self.engine.generate([entry.request for entry in batch]))
        self.turns.add(turn)
        turn.add_done_callback(partial(self._answer, batch))

    def _answer(self, batch: list[Waiting], turn: asyncio.Future[list[Completion]]) -> None:
        """What became of a turn, to all who still wait for it: completions, an error, or that it was called off."""
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
    """One episode's access to the engine; closed when the episode asks for nothing more."""

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
