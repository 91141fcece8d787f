"""The thread that runs commands between steps, with an engine that only counts its steps."""

import asyncio
import math
import threading
from concurrent.futures import Future

import pytest

from openrlhf.errors import EngineError, RolloutError
from openrlhf.rollout import command_thread
from openrlhf.rollout.command_thread import CommandThread, on_thread


@pytest.fixture
def impatient(monkeypatch):
    """Closing does not wait for a thread that is stuck."""
    monkeypatch.setattr(command_thread, "RECOVERY_SECONDS", 0.0)


class Counter(CommandThread):
    """Takes as many steps as it is asked for, then answers all callers with the number of steps taken."""

    def __init__(self, *, builds: bool = True, timeout: float = math.inf) -> None:
        self.builds = builds
        self.released_step = threading.Event()  # set it to end a step that hangs
        self.taken = 0
        self.left = 0
        self.callers = []
        self.threads = set()
        self.released = False
        super().__init__("the counter", timeout)

    def _build(self):
        self.threads.add(threading.current_thread())
        if not self.builds:
            raise ValueError("no such engine")

    def _may_step(self):
        return self.left > 0

    def _step(self):
        self.threads.add(threading.current_thread())
        if self.left == 13:
            raise ValueError("no such kernel")
        if self.left == 7:
            self.released_step.wait()
        if self.left == 1000:
            return  # without progress
        self.taken, self.left = self.taken + 1, self.left - 1
        self._watch.progress()
        if self.left == 0:
            for waiter in self.callers:
                self.answer(waiter, self.taken)
            self.callers.clear()

    def _shut_down(self):
        self.released = True

    async def run(self, steps):
        waiter = Future()
        self.post(lambda: self.begin(steps, waiter), waiter)
        return await asyncio.wrap_future(waiter)

    def begin(self, steps, waiter):
        self.left += steps
        self.callers.append(waiter)

    @on_thread
    def divide(self, number, *, by=1):
        self.threads.add(threading.current_thread())
        if by == 1:
            raise RolloutError("expected another divisor")
        return number / by


async def close(counter):
    await counter.close()
    assert counter.released


def test_commands_and_steps_run_on_one_thread():
    async def run():
        counter = Counter()
        assert await asyncio.gather(counter.run(3), counter.divide(9, by=2)) == [3, 4.5]
        assert await counter.run(2) == 5
        await close(counter)
        return counter.threads

    (thread,) = asyncio.run(run())
    assert thread is not threading.current_thread()


def test_callers_in_several_event_loops_get_their_answers():
    counter = Counter()
    found = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(counter.divide(8, by=2)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4.0] * 4
    asyncio.run(close(counter))


def test_a_rollout_error_is_the_answer_to_its_caller_alone():
    async def run():
        counter = Counter()
        with pytest.raises(RolloutError, match="another divisor"):
            await counter.divide(1)
        await counter.health()
        assert await counter.run(1) == 1
        await close(counter)

    asyncio.run(run())


@pytest.mark.parametrize("steps", [13, 20])
def test_an_error_in_a_step_reaches_all_callers_and_later_ones(steps):
    async def run():
        counter = Counter()
        waiting = await asyncio.gather(counter.run(steps), counter.run(100), return_exceptions=True)
        later = await asyncio.gather(counter.run(1), counter.divide(1, by=2), return_exceptions=True)
        for error in (*waiting, *later):
            assert isinstance(error, EngineError)
            assert "the counter failed and cannot generate any more: ValueError('no such kernel')" in str(error)
        with pytest.raises(EngineError, match="no such kernel"):
            await counter.health()
        await close(counter)

    asyncio.run(run())


def test_any_other_error_of_a_command_means_that_the_engine_failed():
    async def run():
        counter = Counter()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await counter.divide(1, by=0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await counter.health()
        await close(counter)

    asyncio.run(run())


def test_closing_fails_the_callers_that_wait_and_later_ones():
    async def run():
        counter = Counter()
        waiter = Future()
        counter.post(lambda: counter.callers.append(waiter), waiter)  # waits for a step that is never taken
        await close(counter)
        await counter.close()
        for waiting in (asyncio.wrap_future(waiter), counter.run(1), counter.divide(1, by=2), counter.health()):
            with pytest.raises(EngineError, match="closed"):
                await waiting

    asyncio.run(run())


def test_an_engine_that_cannot_be_built_raises_immediately():
    with pytest.raises(ValueError, match="no such engine"):
        Counter(builds=False)


@pytest.mark.parametrize("steps", [7, 1000])
def test_an_engine_without_progress_fails_all_callers_and_can_be_closed(impatient, steps):
    """With seven steps left, the step never returns; with a thousand, steps return without progress."""

    async def run():
        counter = Counter(timeout=0.3)
        waiting = [asyncio.create_task(counter.run(steps))]
        while not counter.callers:
            await asyncio.sleep(0)
        if steps == 7:  # commands that the thread never gets to
            waiting.append(asyncio.create_task(counter.divide(1, by=2)))
        for waiter in waiting:
            with pytest.raises(EngineError, match=r"the counter hangs: no progress for .* while taking a step"):
                await waiter
        for later in (counter.run(1), counter.divide(1, by=2), counter.health()):
            with pytest.raises(EngineError, match="the counter hangs"):
                await later
        await counter.close()
        counter.released_step.set()

    asyncio.run(run())


def test_an_idle_engine_does_not_count_as_hanging():
    async def run():
        counter = Counter(timeout=0.1)
        await asyncio.sleep(0.5)
        assert await counter.run(3) == 3
        await close(counter)

    asyncio.run(run())


def test_a_command_that_never_returns_is_named(impatient):
    async def run():
        counter = Counter(timeout=0.1)
        waiter = Future()
        counter.post(counter.released_step.wait, waiter, "loading weights")
        with pytest.raises(EngineError, match=r"no progress for .* while loading weights"):
            await asyncio.wrap_future(waiter)
        await counter.close()
        counter.released_step.set()

    asyncio.run(run())
