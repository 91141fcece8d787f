"""Coroutines run from synchronous code while an event loop is running, and how Ctrl-C stops them."""

import asyncio
import signal
import threading

import pytest

from openrlhf.event_loop import run_async
from openrlhf.signals import stop_request


def in_notebook(function):
    """Call a function while an event loop runs in this thread."""

    async def cell():
        return function()

    return asyncio.run(cell())


async def name_of_thread():
    return threading.current_thread().name


def test_without_a_loop_the_coroutine_runs_here():
    assert run_async(name_of_thread()) == threading.current_thread().name


def test_if_a_loop_is_running_the_coroutine_runs_in_a_thread():
    assert in_notebook(lambda: run_async(name_of_thread())) == "openrlhf-event-loop"


def test_errors_pass_through():
    async def fail():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        in_notebook(lambda: run_async(fail()))


@pytest.fixture(autouse=True)
def python_handler():
    """Start from Python's own handler and check that it is restored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_the_first_interrupt_requests_a_stop_and_a_second_one_cancels():
    ends = []

    async def work(signals):
        try:
            with stop_request() as stop:
                for _ in range(signals):
                    signal.raise_signal(signal.SIGINT)  # Python handles it in the main thread
                    while not stop.requested:
                        await asyncio.sleep(0)
                if signals == 2:
                    await asyncio.Event().wait()
                return "stopped cleanly"
        finally:
            ends.append(signals)

    assert in_notebook(lambda: run_async(work(1))) == "stopped cleanly"
    with pytest.raises(KeyboardInterrupt):
        in_notebook(lambda: run_async(work(2)))
    assert ends == [1, 2]


def test_an_interrupt_without_a_stop_request_cancels():
    async def work():
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        in_notebook(lambda: run_async(work()))
