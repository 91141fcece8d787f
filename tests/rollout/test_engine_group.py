"""Routing requests to engines, and replacing engines that fail. The processes are stand-ins."""

import asyncio
from contextlib import suppress

import pytest

from openrlhf.errors import DeathError, EngineError, RolloutError
from openrlhf.rollout.engine_group import EPISODE_SLACK, PROMPT_SLACK, EngineGroup, EngineReplica
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.types import Request, SamplingParams

REQUESTS = [Request((1,), SamplingParams(max_tokens=1), prefix=number) for number in range(4)]


class AnsweringProcess:
    """Stand-in for an engine process, which answers with its own name."""

    def __init__(self, name):
        self.name = name
        self.killed = False
        self.submitted = {}
        self.may_answer = asyncio.Event()

    def within(self, _):
        return self

    async def call(self, method, *arguments):
        if method is EngineWorker.submit:
            self.submitted |= arguments[0]
            self.may_answer.set()
        elif method is EngineWorker.collect:
            await self.may_answer.wait()
            self.may_answer.clear()
            finished, self.submitted = self.submitted, {}
            return dict.fromkeys(finished, self.name)
        return None

    def kill(self):
        self.killed = True


class FailingProcess(AnsweringProcess):
    def __init__(self, name, error):
        super().__init__(name)
        self.error = error

    async def call(self, method, *_):
        raise self.error


class EngineSet:
    """Engines with these processes; their replacements answer once `may_start` is set."""

    def __init__(self, *processes, max_restarts=1):
        self.started = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        pool = [EngineReplica(number, process) for number, process in enumerate(processes)]
        self.engines = EngineGroup(pool, self.start, max_restarts)

    async def start(self, number):
        self.started.append(number)
        await self.may_start.wait()
        return AnsweringProcess(f"new {number}")


LOSSES = {"dead": DeathError("engine 0 died"), "broken within": EngineError("engine 0 failed")}


@pytest.mark.parametrize("error", LOSSES.values(), ids=LOSSES)
def test_a_lost_engine_is_replaced_once_and_every_request_is_answered(error):
    async def scenario():
        pool = EngineSet(lost := FailingProcess("first", error), AnsweringProcess("second"))
        weights = []

        async def bring_weights():
            weights.append("brought")

        pool.engines.send_weights = bring_weights
        answers = await pool.engines.generate(REQUESTS)
        assert set(answers) <= {"second", "new 0"}
        assert (pool.started, weights, lost.killed) == ([0], ["brought"], True)

    asyncio.run(scenario())


def test_a_request_error_reaches_only_its_caller():
    async def scenario():
        pool = EngineSet(FailingProcess("first", RolloutError("too long")))
        with pytest.raises(RolloutError, match="too long"):
            await pool.engines.generate(REQUESTS)
        assert pool.started == []

    asyncio.run(scenario())


def test_an_unexpected_error_of_a_call_reaches_its_caller():
    async def scenario():
        pool = EngineSet(FailingProcess("first", RuntimeError("evicted")))
        with pytest.raises(RuntimeError, match="evicted"):
            await asyncio.wait_for(pool.engines.generate(REQUESTS), 60)

    asyncio.run(scenario())


def test_an_engine_lost_more_often_than_max_restarts_ends_the_run():
    async def scenario():
        pool = EngineSet(FailingProcess("first", LOSSES["dead"]), max_restarts=0)
        with pytest.raises(EngineError, match=r"engine 0 died, after 0 restarts \(--max_restarts\)"):
            await pool.engines.generate(REQUESTS)

    asyncio.run(scenario())


def test_only_failed_engines_are_replaced():
    async def scenario():
        pool = EngineSet(
            AnsweringProcess("first"),
            FailingProcess("second", LOSSES["broken within"]),
            FailingProcess("third", LOSSES["dead"]),
        )
        assert await pool.engines.replace_failed()
        assert pool.started == [1, 2]
        assert not await pool.engines.replace_failed()
        assert [engine.process.name for engine in pool.engines.engines] == ["first", "new 1", "new 2"]

    asyncio.run(scenario())


def test_a_cancelled_request_does_not_cancel_the_engines_restart():
    async def scenario():
        pool = EngineSet(FailingProcess("first", LOSSES["dead"]))
        pool.may_start.clear()
        first = asyncio.create_task(pool.engines.generate(REQUESTS[:1]))
        while not pool.started:
            await asyncio.sleep(0)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        pool.may_start.set()
        assert await pool.engines.generate(REQUESTS[1:2]) == ["new 0"]
        assert pool.started == [0]

    asyncio.run(scenario())


def test_new_requests_do_not_wait_for_an_engine_that_is_being_replaced():
    async def scenario():
        pool = EngineSet(FailingProcess("first", DeathError("engine 0 died")), AnsweringProcess("second"))
        pool.may_start.clear()
        first_request = asyncio.ensure_future(pool.engines.generate(REQUESTS[:1]))
        while not pool.started:
            await asyncio.sleep(0)
        assert await pool.engines.generate(REQUESTS[:2]) == ["second"] * 2
        pool.may_start.set()
        assert await first_request == ["second"]
        assert pool.engines.choose(asks(9)).number == 0  # it is back

    asyncio.run(scenario())


def asks(prefix, episode=None):
    return Request((1,), SamplingParams(max_tokens=1), prefix, episode)


def test_requests_follow_their_prefix_until_that_engine_is_busier():
    async def scenario():
        engines = EngineSet(AnsweringProcess("first"), AnsweringProcess("second")).engines
        first, second = engines.engines
        assert engines.choose(asks(7)) is first
        first.running = PROMPT_SLACK
        assert engines.choose(asks(7)) is first
        assert engines.choose(asks(8)) is second
        first.running = PROMPT_SLACK + 1
        assert engines.choose(asks(7)) is second

    asyncio.run(scenario())


def test_an_episode_stays_with_its_engine_longer_than_its_prompt():
    async def scenario():
        engines = EngineSet(AnsweringProcess("first"), AnsweringProcess("second")).engines
        first, second = engines.engines
        assert engines.choose(asks(7, episode=1)) is first
        first.running = EPISODE_SLACK
        assert engines.choose(asks(7, episode=2)) is second
        assert engines.choose(asks(7, episode=1)) is first
        engines.forget_caches()
        assert engines.choose(asks(7, episode=1)) is second

    asyncio.run(scenario())


class HoldingProcess(AnsweringProcess):
    """An engine that answers when `may_continue` is set."""

    def __init__(self, name):
        super().__init__(name)
        self.may_continue = asyncio.Event()

    async def call(self, method, *arguments):
        if method is EngineWorker.collect:
            await self.may_continue.wait()
        return await super().call(method, *arguments)


@pytest.mark.parametrize(
    ("prompts", "samples", "engines", "most"),
    [(64, 8, 2, 256), (64, 8, 3, 176), (5, 8, 2, 24), (1, 512, 2, 264), (4, 32, 8, 24)],
)
def test_groups_are_spread_evenly(prompts, samples, engines, most):
    async def scenario():
        processes = [HoldingProcess(str(number)) for number in range(engines)]
        pool = EngineSet(*processes).engines
        rows = [[Request((1,), SamplingParams(max_tokens=1), prefix=prompt)] * samples for prompt in range(prompts)]
        tasks = [asyncio.create_task(pool.generate(row)) for row in rows]
        while sum(engine.running for engine in pool.engines) < prompts * samples:
            await asyncio.sleep(0)
        assert max(engine.running for engine in pool.engines) <= most
        for process in processes:
            process.may_continue.set()
        answers = await asyncio.gather(*tasks)
        if samples <= PROMPT_SLACK:  # the samples of a prompt share a cache
            assert all(len(set(answer)) == 1 for answer in answers)
        assert [engine.running for engine in pool.engines] == [0] * engines

    asyncio.run(scenario())
