"""Dynamic batching for the reward model server: rows of concurrent requests share forward passes.

Rows wait in a queue. Whenever the model is free, the batcher takes the oldest rows as one round and cuts the round
into forwards of rows with similar length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from openrlhf.inference.served_model import Row

ROUND = 8  # forwards per full round: enough rows to group by length, few enough that new requests do not wait long

Asked = tuple[Row, asyncio.Future[float]]


@dataclass(frozen=True)
class ForwardLimits:
    """Limits on one forward. Padding counts as tokens. A row that exceeds the limits by itself runs alone."""

    rows: int | None
    tokens: int
    packing: bool

    def hold(self, count: int, longest: int, total: int) -> bool:
        """Return whether `count` rows with `total` tokens, the longest of `longest`, fit into one forward."""
        return count <= (self.rows or count) and (total if self.packing else count * longest) <= self.tokens


class Batcher:
    """Queue that scores rows in batches on its own thread, while the async context is open.

    The oldest rows form a round. Within a round, rows of similar length share a forward to keep padding low, so no row
    is overtaken by more than one round. The rows of one request may be split over several forwards.
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
        """Return a reward for each row; errors of the model are raised here."""
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in rows]
        self._waiting.extend(zip(rows, answers, strict=True))
        self._arrived.set()
        return await asyncio.gather(*answers)

    async def _run(self) -> None:
        """Score rounds until cancelled, one forward at a time."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for together in cut(self._take_round(), self._limits):
                scoring = loop.run_in_executor(self._thread, self._score, [row for row, _ in together])
                await asyncio.wait({scoring})
                settle([answer for _, answer in together], scoring)

    def _take_round(self) -> list[Asked]:
        """Remove and return the oldest rows, in order of arrival, up to the tokens of `ROUND` forwards."""
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
    """Split a round into forwards: shortest rows first, each forward as full as the limits allow."""
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
    """Set the reward of each row, or the error on all of them; futures of cancelled requests are skipped."""
    error = scoring.exception()
    for place, answer in enumerate(answers):
        if answer.done():
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(scoring.result()[place])
