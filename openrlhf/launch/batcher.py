"""Rows of many requests scored together: whatever waits when the model has time is one round of forwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from openrlhf.launch.served_model import Row

ROUND = 8  # forwards of a full round: enough to find rows of a length, few enough that a newcomer's turn comes soon

Asked = tuple[Row, asyncio.Future[float]]


@dataclass(frozen=True)
class ForwardLimits:
    """What one forward may hold. Padding counts as tokens; a row that is too long by itself goes alone."""

    rows: int | None
    tokens: int
    packing: bool

    def hold(self, count: int, longest: int, total: int) -> bool:
        return count <= (self.rows or count) and (total if self.packing else count * longest) <= self.tokens


class Batcher:
    """As a context it scores, on a thread of its own; the rows of a request may be split.

    The oldest rows make a round, and within it rows of like length share a forward, so that little is padded: nobody
    is overtaken by more than one round.
    """

    def __init__(self, score: Callable[[Sequence[Row]], Sequence[float]], limits: ForwardLimits) -> None:
        self._score = score
        self._limits = limits
        self._waiting: deque[Asked] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "openrlhf-scoring")
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def score(self, rows: Sequence[Row]) -> list[float]:
        """A reward for each row; raises what the model raised."""
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in rows]
        self._waiting.extend(zip(rows, answers, strict=True))
        self._arrived.set()
        return await asyncio.gather(*answers)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for together in cut(self._take_round(), self._limits):
                scoring = loop.run_in_executor(self._thread, self._score, [row for row, _ in together])
                await asyncio.wait({scoring})
                settle([answer for _, answer in together], scoring)

    def _take_round(self) -> list[Asked]:
        """The oldest rows, in the order they came."""
        taken: list[Asked] = []
        tokens = 0
        while self._waiting and tokens < ROUND * self._limits.tokens:
            taken.append(self._waiting.popleft())
            tokens += len(taken[-1][0])
        if not self._waiting:
            self._arrived.clear()
        return taken

    async def __aenter__(self) -> Batcher:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._thread.shutdown(wait=False)


def cut(taken: Sequence[Asked], limits: ForwardLimits) -> list[list[Asked]]:
    """Forwards of a round, the shortest rows first, each as full as it may be."""
    forwards: list[list[Asked]] = []
    total = 0
    for asked in sorted(taken, key=lambda one: len(one[0])):
        length = len(asked[0])
        if forwards and limits.hold(len(forwards[-1]) + 1, length, total + length):
            forwards[-1].append(asked)
            total += length
        else:
            forwards.append([asked])
            total = length
    return forwards


def settle(answers: Sequence[asyncio.Future[float]], scoring: asyncio.Future[Sequence[float]]) -> None:
    """Gives each row its reward, or all of them the error; nobody listens any more to one that was cancelled."""
    error = scoring.exception()
    for place, answer in enumerate(answers):
        if answer.done():
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(scoring.result()[place])
