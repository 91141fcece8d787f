"""Requests go to the engine in batches whose order depends only on the episodes, so a run repeats exactly."""

import asyncio
import random

import pytest

from openrlhf.rl.request_batching import EpisodeScheduler
from openrlhf.types import Request, SamplingParams
from tests.rl.stand_ins import EchoEngine


def request(*ids):
    return Request(ids, SamplingParams(max_tokens=1, seed=sum(ids)))


async def episode(session, number, turns):
    answers = [await session.generate(request(number, turn)) for turn in range(turns)]
    session.close()
    return [answer.token_ids[0] for answer in answers]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_turns_advance_together_in_any_arrival_order(order):
    engine, turns = EchoEngine(), (3, 1, 2)

    async def main():
        async with EpisodeScheduler(engine).open_group(3) as sessions:
            tasks = {number: asyncio.create_task(episode(sessions[number], number, turns[number])) for number in order}
            return [await tasks[number] for number in range(3)]

    assert asyncio.run(main()) == [[0, 1, 2], [1], [2, 3]]
    assert engine.batches == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]


def test_an_episode_that_ends_without_a_request_does_not_block_others():
    engine = EchoEngine()

    async def main():
        async with EpisodeScheduler(engine).open_group(2) as (first, second):
            request_task = asyncio.create_task(episode(first, 0, 1))
            await settle()
            assert engine.batches == []
            second.close()
            second.close()  # closing twice is allowed
            return await request_task

    assert asyncio.run(main()) == [0]


def test_an_engine_failure_reaches_every_episode():
    class BrokenEngine:
        version = 0

        async def generate(self, requests):
            raise RuntimeError("no memory")

    async def main():
        async with EpisodeScheduler(BrokenEngine()).open_group(2) as sessions:
            return await asyncio.gather(
                *(episode(session, number, 1) for number, session in enumerate(sessions)), return_exceptions=True
            )

    assert [str(error) for error in asyncio.run(main())] == ["no memory", "no memory"]


def test_an_ended_episode_cannot_send_requests():
    async def main():
        async with EpisodeScheduler(EchoEngine()).open_group(1) as (session,):
            session.close()
            await session.generate(request(1))

    with pytest.raises(AssertionError, match="an episode requested tokens after it had ended"):
        asyncio.run(main())


async def settle():
    """Let the event loop run until only the test can cause anything."""
    for _ in range(50):
        await asyncio.sleep(0)


def batches_with_limit(limit, turns, shuffle=lambda runs: None):
    """Return the engine's batches for groups with these turns per sample; `shuffle` reorders the samples of a group."""
    engine = EchoEngine()

    async def main():
        scheduler = EpisodeScheduler(engine, limit)

        async def group(lengths):
            async with scheduler.open_group(len(lengths)) as sessions:
                runs = [(session, turns) for session, turns in zip(sessions, lengths, strict=True)]
                shuffle(runs)
                await asyncio.gather(*(episode(session, session.episode, turns) for session, turns in runs))

        await asyncio.gather(*map(group, turns))
        assert scheduler.running == 0

    asyncio.run(asyncio.wait_for(main(), 60))
    return [[ids[0] for ids in batch] for batch in engine.batches]


def test_a_limit_bounds_running_episodes_and_starts_the_next_group_when_possible():
    assert batches_with_limit(2, [(2,), (1,), (1,), (3,)]) == [[0, 1], [0, 2], [3], [3], [3]]
    assert batches_with_limit(4, [(1, 3), (1, 1), (1, 1)]) == [[0, 1, 2, 3], [1, 4, 5], [1]]
    assert batches_with_limit(3, [(2, 2), (1, 1)]) == [[0, 1], [0, 1], [2, 3]]  # two groups of two exceed three


def test_a_limit_smaller_than_a_group_runs_one_group_at_a_time():
    assert batches_with_limit(1, [(1, 2), (1, 1)]) == [[0, 1], [1], [2, 3]]


def test_episodes_without_requests_free_their_slot():
    assert batches_with_limit(2, [(0, 0), (0, 0), (1, 0), (0, 1)]) == [[4], [7]]
    assert batches_with_limit(2, [(0,), (0,), (0,)]) == []


@pytest.mark.parametrize("limit", [1, 3, 4, 7, None])
def test_the_order_of_episodes_does_not_change_batches(limit):
    turns = [(1, 2), (3, 0), (0, 0), (2, 2), (1, 4), (0, 1)]
    expected = batches_with_limit(limit, turns)
    assert sorted(number for batch in expected for number in batch) == sorted(
        number for number, count in enumerate(count for group in turns for count in group) for _ in range(count)
    )
    assert all(len(batch) <= max(limit or 12, 2) for batch in expected)
    for seed in range(10):
        assert batches_with_limit(limit, turns, random.Random(seed).shuffle) == expected


def test_a_cancelled_group_takes_no_slot():
    engine = EchoEngine()

    async def main():
        scheduler = EpisodeScheduler(engine, 1)

        async def group(number):
            async with scheduler.open_group(1) as (session,):
                await may_end.wait()
                await episode(session, number, 1)

        may_end = asyncio.Event()
        first, second, third = (asyncio.create_task(group(number)) for number in range(3))
        await settle()
        second.cancel()
        may_end.set()
        await asyncio.gather(first, third)
        assert second.cancelled()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.batches == [[(0, 0)], [(2, 0)]]


def test_a_cancelled_request_is_not_sent_and_its_group_ends():
    engine = EchoEngine()

    async def main():
        scheduler = EpisodeScheduler(engine)

        async def group(number):
            async with scheduler.open_group(1) as (session,):
                await episode(session, number, 1)

        async with scheduler.open_group(1) as (slow,):
            first, second = (asyncio.create_task(group(number)) for number in (1, 2))
            await settle()
            first.cancel()
            await settle()
            assert (scheduler.running, engine.batches) == (2, [])
            await episode(slow, 0, 1)
            await second

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.batches == [[(0, 0), (2, 0)]]


def test_without_lockstep_every_request_is_answered_by_itself():
    """The second sample finishes two turns while the engine is still working on the first."""

    class WaitingEngine(EchoEngine):
        async def generate(self, requests):
            if requests[0].prompt_token_ids == (0, 0):
                await may_answer.wait()
            return await super().generate(requests)

    async def main():
        nonlocal may_answer
        may_answer = asyncio.Event()
        async with EpisodeScheduler(engine, lockstep=False).open_group(2, 7) as sessions:
            first = asyncio.create_task(episode(sessions[0], 0, 1))
            assert await episode(sessions[1], 1, 2) == [1, 2]
            assert not first.done()
            may_answer.set()
            return await first

    may_answer, engine = None, WaitingEngine()
    assert asyncio.run(asyncio.wait_for(main(), 60)) == [0]
    assert engine.batches == [[(1, 0)], [(1, 1)], [(0, 0)]]
