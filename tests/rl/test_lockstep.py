"""Requests go to the engine together, in an order that depends on nothing but the episodes."""

import asyncio

import pytest
from hand import EchoEngine

from openrlhf.rl.lockstep import Turnstile
from openrlhf.types import Request, SamplingParams


def request(*ids):
    return Request(ids, SamplingParams(max_tokens=1, seed=sum(ids)))


async def episode(session, number, turns):
    answers = [await session.generate(request(number, turn)) for turn in range(turns)]
    session.close()
    return [answer.token_ids[0] for answer in answers]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_turns_advance_together_whoever_comes_first(order):
    engine, turns = EchoEngine(), (3, 1, 2)

    async def main():
        sessions = Turnstile(engine, 3).sessions()
        tasks = {number: asyncio.create_task(episode(sessions[number], number, turns[number])) for number in order}
        return [await tasks[number] for number in range(3)]

    assert asyncio.run(main()) == [[0, 1, 2], [1], [2, 3]]
    assert engine.batches == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]


def test_who_leaves_without_asking_holds_nobody_up():
    engine = EchoEngine()

    async def main():
        first, second = Turnstile(engine, 2).sessions()
        asks = asyncio.create_task(episode(first, 0, 1))
        await asyncio.sleep(0)
        assert engine.batches == []
        second.close()
        second.close()  # twice is once
        return await asks

    assert asyncio.run(main()) == [0]


def test_a_failing_engine_is_heard_by_everyone():
    class Broken:
        version = 0

        async def generate(self, requests):
            raise RuntimeError("no memory")

    async def main():
        sessions = Turnstile(Broken(), 2).sessions()
        return await asyncio.gather(
            *(episode(session, number, 1) for number, session in enumerate(sessions)), return_exceptions=True
        )

    assert [str(error) for error in asyncio.run(main())] == ["no memory", "no memory"]


def test_an_episode_that_ended_cannot_ask():
    async def main():
        (session,) = Turnstile(EchoEngine(), 1).sessions()
        session.close()
        await session.generate(request(1))

    with pytest.raises(AssertionError, match="an episode that has ended asked for more tokens"):
        asyncio.run(main())
