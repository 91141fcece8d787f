"""Dynamic batching for the reward model server: rows of concurrent requests share forward passes.

Rows wait in a queue. Whenever the model is free, the batcher takes the oldest rows as one round and cuts the round
into forwards of rows with similar length. `serve_app` awaits `Batcher.score` for each request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from openrlhf.rl.reward_models import Row

ROUND = 8  # forwards per full round: enough to group rows by length, few enough that new requests do not wait long


class QueuedRow(NamedTuple):
    """A row that waits for its reward."""

    ids: Row
    reward: asyncio.Future[float]


@dataclass(frozen=True)
class ForwardLimits:
    """Limits on one forward. A row that exceeds the limits by itself runs alone."""

    rows: int | None  # None: any number
    tokens: int  # padding counts
    packing: bool  # rows are concatenated, so there is no padding

    def hold(self, count: int, longest: int, total: int) -> bool:
        """Return whether `count` rows fit into one forward: `total` tokens in all, `longest` in the longest row."""
        return count <= (self.rows or count) and (total if self.packing else count * longest) <= self.tokens


class Batcher:
    """Queue that scores rows in batches on its own thread, while the async context is open.

    The oldest rows form a round. Within a round, rows of similar length share a forward to keep padding low, so no row
    is overtaken by more than one round. The rows of one request may be split over several forwards.
    """

    def __init__(self, score: Callable[[Sequence[Row]], Sequence[float]], limits: ForwardLimits) -> None:
        self._score = score
        self._limits = limits
        self._waiting: deque[QueuedRow] = deque()
        self._arrived = asyncio.Event()  # set while rows wait
        self._thread = ThreadPoolExecutor(1, "openrlhf-scoring")

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def score(self, rows: Sequence[Row]) -> list[float]:
        """Return a reward for each row; errors of the model are raised here."""
        loop = asyncio.get_running_loop()
        queued = [QueuedRow(row, loop.create_future()) for row in rows]
        self._waiting.extend(queued)
        self._arrived.set()
        return await asyncio.gather(*(row.reward for row in queued))

    async def _run(self) -> None:
        """Score rounds until cancelled, one forward at a time."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for rows in cut(self._take_round(), self._limits):
                scoring = loop.run_in_executor(self._thread, self._score, [row.ids for row in rows])
                await asyncio.wait({scoring})
                error = scoring.exception()
                for place, row in enumerate(rows):
                    if row.reward.done():  # its request was cancelled
                        continue
                    if error is not None:
                        row.reward.set_exception(error)
                    else:
                        row.reward.set_result(scoring.result()[place])

    def _take_round(self) -> list[QueuedRow]:
        """Remove and return the oldest rows, in order of arrival, up to the tokens of `ROUND` forwards."""
        taken: list[QueuedRow] = []
        tokens = 0
        while self._waiting and tokens < ROUND * self._limits.tokens:
            taken.append(self._waiting.popleft())
            tokens += len(taken[-1].ids)
        if not self._waiting:
            self._arrived.clear()
        return taken

    async def __aenter__(self) -> Batcher:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._thread.shutdown(wait=False, cancel_futures=True)


def cut(rows: Sequence[QueuedRow], limits: ForwardLimits) -> list[list[QueuedRow]]:
    """Split a round into forwards: shortest rows first, each forward as full as the limits allow."""
    forwards: list[list[QueuedRow]] = []
    total = 0  # tokens of the last forward
    for row in sorted(rows, key=lambda row: len(row.ids)):
        length = len(row.ids)
        if forwards and limits.hold(len(forwards[-1]) + 1, length, total + length):
            forwards[-1].append(row)
            total += length
        else:
            forwards.append([row])
            total = length
    return forwards
