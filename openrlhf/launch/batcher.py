"""Rows of many requests scored together: whatever waits while the model is busy goes into its next forward."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from openrlhf.launch.served_model import Row


@dataclass(frozen=True)
class ForwardLimits:
    """What one forward may hold. Padding counts as tokens; a row that is too long by itself goes alone."""

    rows: int | None
    tokens: int
    packing: bool

    def hold(self, count: int, longest: int, total: int) -> bool:
        return count <= (self.rows or count) and (total if self.packing else count * longest) <= self.tokens


class Batcher:
    """As a context it scores, on a thread of its own, first come first served; rows of a request may be split."""

    def __init__(self, score: Callable[[Sequence[Row]], Sequence[float]], limits: ForwardLimits) -> None:
        self._score = score
        self._limits = limits
        self._waiting: deque[tuple[Row, asyncio.Future[float]]] = deque()
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
            taken = self._take()
            scoring = loop.run_in_executor(self._thread, self._score, [row for row, _ in taken])
            await asyncio.wait({scoring})
            settle([answer for _, answer in taken], scoring)

    def _take(self) -> list[tuple[Row, asyncio.Future[float]]]:
        """The next forward: the oldest rows, as many as it may hold."""
        taken = [self._waiting.popleft()]
        longest = total = len(taken[0][0])
        while self._waiting:
            length = len(self._waiting[0][0])
            longest, total = max(longest, length), total + length
            if not self._limits.hold(len(taken) + 1, longest, total):
                break
            taken.append(self._waiting.popleft())
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
