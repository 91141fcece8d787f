"""Requests over engines that come and go: who is asked, who is replaced. The processes are stand-ins, without Ray."""

import asyncio
from contextlib import suppress

import pytest

from openrlhf.cluster.calls import DeathError, Fate
from openrlhf.cluster.engines import SLACK, Engine, RayEngines
from openrlhf.errors import EngineError, RolloutError
from openrlhf.types import Request, SamplingParams

ASKED = [Request((1,), SamplingParams(max_tokens=1), prefix=number) for number in range(4)]


class Answering:
    """Stands for a process that answers with its own name."""

    def __init__(self, name):
        self.name = name
        self.killed = False

    async def call(self, method, requests):
        if (method, requests) == ("do", "health"):
            return None
        assert method == "generate"
        return [self.name] * len(requests)

    def kill(self):
        self.killed = True


class Failing(Answering):
    def __init__(self, name, error):
        super().__init__(name)
        self.error = error

    async def call(self, method, *_):
        raise self.error


class Crew:
    """Engines with these processes; those that are started in their place answer once `may_start` is set."""

    def __init__(self, *processes, max_restarts=1):
        self.started = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        crew = [Engine(number, process) for number, process in enumerate(processes)]
        self.engines = RayEngines(crew, self.start, Fate(), max_restarts=max_restarts)

    async def start(self, number):
        self.started.append(number)
        await self.may_start.wait()
        return Answering(f"new {number}")


LOSSES = {"dead": DeathError("engine 0 died"), "broken within": EngineError("engine 0 failed")}


@pytest.mark.parametrize("error", LOSSES.values(), ids=LOSSES)
def test_an_engine_that_is_lost_is_replaced_once_and_everything_is_answered(error):
    async def play():
        crew = Crew(lost := Failing("first", error), Answering("second"))
        weights = []

        async def bring():
            weights.append("brought")

        crew.engines.bring_weights = bring
        answers = await crew.engines.generate(ASKED)
        assert set(answers) <= {"second", "new 0"}
        assert (crew.started, weights, lost.killed) == ([0], ["brought"], True)

    asyncio.run(play())


def test_an_error_of_a_request_is_its_own():
    async def play():
        crew = Crew(Failing("first", RolloutError("too long")))
        with pytest.raises(RolloutError, match="too long"):
            await crew.engines.generate(ASKED)
        assert crew.started == []

    asyncio.run(play())


def test_an_engine_that_was_lost_too_often_ends_the_run():
    async def play():
        crew = Crew(Failing("first", LOSSES["dead"]), max_restarts=0)
        with pytest.raises(EngineError, match=r"engine 0 died, after 0 restarts \(--max_restarts\)"):
            await crew.engines.generate(ASKED)

    asyncio.run(play())


def test_who_has_failed_is_replaced_and_nobody_else():
    async def play():
        crew = Crew(Answering("first"), Failing("second", LOSSES["broken within"]), Failing("third", LOSSES["dead"]))
        assert await crew.engines.replace_failed()
        assert crew.started == [1, 2]
        assert not await crew.engines.replace_failed()
        assert [engine.process.name for engine in crew.engines.engines] == ["first", "new 1", "new 2"]

    asyncio.run(play())


def test_a_request_that_is_taken_back_leaves_the_engine_to_the_next():
    async def play():
        crew = Crew(Failing("first", LOSSES["dead"]))
        crew.may_start.clear()
        first = asyncio.create_task(crew.engines.generate(ASKED[:1]))
        while not crew.started:
            await asyncio.sleep(0)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        crew.may_start.set()
        assert await crew.engines.generate(ASKED[1:2]) == ["new 0"]
        assert crew.started == [0]

    asyncio.run(play())


def test_new_requests_do_not_wait_for_an_engine_that_is_being_replaced():
    async def play():
        crew = Crew(Failing("first", DeathError("engine 0 died")), Answering("second"))
        crew.may_start.clear()
        noticed = asyncio.ensure_future(crew.engines.generate(ASKED[:1]))
        while not crew.started:
            await asyncio.sleep(0)
        assert await crew.engines.generate(ASKED[:2]) == ["second"] * 2
        crew.may_start.set()
        assert await noticed == ["second"]
        assert crew.engines.choose(9).number == 0  # it is back

    asyncio.run(play())


def test_requests_go_where_their_prefix_is_until_that_engine_is_much_busier():
    async def play():
        engines = Crew(Answering("first"), Answering("second")).engines
        first, second = engines.engines
        assert engines.choose(7) is first
        first.running = SLACK
        assert engines.choose(7) is first
        assert engines.choose(8) is second
        first.running = SLACK + 1
        assert engines.choose(7) is second

    asyncio.run(play())
