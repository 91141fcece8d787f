"""Which rows share a forward pass, and in what order. The model is a plain function."""

import asyncio
import threading

import numpy as np
import pytest

from openrlhf.inference.batcher import ROUND, Batcher, ForwardLimits


def rows(*lengths):
    return [np.zeros(length, dtype=np.int32) for length in lengths]


class LengthModel:
    """Score a row by its length and record the lengths of each forward; the first forward waits for an event."""

    def __init__(self):
        self.forwards = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def score(self, taken):
        self.forwards.append([len(row) for row in taken])
        self.begun.set()
        assert self.go_on.wait(30)
        return [float(len(row)) for row in taken]


def score_behind_a_busy_model(limits, *requests):
    """Return the answers of requests that arrived during the first forward, and the forwards after it."""
    model = LengthModel()

    async def ask():
        async with Batcher(model.score, limits) as batcher:
            first = asyncio.create_task(batcher.score(rows(1)))
            await asyncio.to_thread(model.begun.wait, 30)
            others = [asyncio.create_task(batcher.score(rows(*lengths))) for lengths in requests]
            while batcher.num_waiting < sum(map(len, requests)):
                await asyncio.sleep(0)
            model.go_on.set()
            assert await first == [1.0]
            return await asyncio.gather(*others)

    return asyncio.run(ask()), model.forwards[1:]


@pytest.mark.parametrize(
    ("limits", "forwards"),
    [
        (ForwardLimits(None, 1000, packing=False), [[2, 3, 4, 5, 9]]),
        (ForwardLimits(2, 1000, packing=False), [[2, 3], [4, 5], [9]]),
        (ForwardLimits(None, 18, packing=False), [[2, 3, 4], [5, 9]]),
        (ForwardLimits(None, 18, packing=True), [[2, 3, 4, 5], [9]]),
        (ForwardLimits(None, 6, packing=True), [[2, 3], [4], [5], [9]]),  # a row over the limit is alone
    ],
)
def test_waiting_rows_of_similar_length_share_a_forward(limits, forwards):
    answers, seen = score_behind_a_busy_model(limits, (2, 3), (9,), (4, 5))
    assert answers == [[2.0, 3.0], [9.0], [4.0, 5.0]]
    assert seen == forwards


def test_an_earlier_request_is_not_overtaken_by_shorter_rows():
    limits = ForwardLimits(None, 10, packing=False)
    long = (10,) * ROUND
    _, seen = score_behind_a_busy_model(limits, long, (1, 2), (3,))
    assert seen == [*([10] for _ in long), [1, 2, 3]]


def test_a_failed_forward_fails_its_requests_and_the_batcher_continues():
    def score(taken):
        if len(taken[0]) == 13:
            raise RuntimeError("no luck")
        return [0.0] * len(taken)

    async def ask():
        async with Batcher(score, ForwardLimits(1, 100, packing=False)) as batcher:
            with pytest.raises(RuntimeError, match="no luck"):
                await batcher.score(rows(1, 13, 2))
            return await batcher.score(rows(1))

    assert asyncio.run(ask()) == [0.0]
