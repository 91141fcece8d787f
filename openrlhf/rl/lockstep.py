"""Episodes side by side, in step: whenever every living one waits for the engine, their requests go to it in one batch.

Bulk admission is what engines are fast at, and the batches depend on nothing but the episodes: a run repeats exactly.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

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

    def __init__(self, engine: Engine, sessions: int) -> None:
        self.engine = engine
        self.alive = sessions
        self.waiting: list[Waiting] = []
        self.turns: set[asyncio.Future[list[Completion]]] = set()  # kept, or they might be collected

    def sessions(self) -> list[Session]:
        return [Session(self, number) for number in range(self.alive)]

    async def ask(self, number: int, request: Request) -> Completion:
        entry = Waiting(number, request, asyncio.get_running_loop().create_future())
        self.waiting.append(entry)
        self.turn_if_ready()
        return await entry.answer

    def leave(self) -> None:
        self.alive -= 1
        self.turn_if_ready()

    def turn_if_ready(self) -> None:
        if self.waiting and len(self.waiting) == self.alive:
            batch = sorted(self.waiting, key=lambda entry: entry.number)
            self.waiting.clear()
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

    def __init__(self, turnstile: Turnstile, number: int) -> None:
        self.turnstile = turnstile
        self.number = number
        self.open = True

    async def generate(self, request: Request) -> Completion:
        assert self.open, "an episode that has ended asked for more tokens"
        return await self.turnstile.ask(self.number, request)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.turnstile.leave()
