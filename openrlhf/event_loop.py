"""Run a coroutine from synchronous code, even in a notebook.

A notebook runs its cells on an event loop, and Python refuses to run a second loop in the same thread. `run_async` then
runs the coroutine in a separate thread, and the calling thread waits. Ctrl-C works as elsewhere: the first one ends a
run after its step, with a checkpoint; otherwise it cancels the coroutine.

`mark_retrieved` and `cancel_all` are for futures that may fail after their callers have gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from openrlhf.signals import forward_signals

Result = TypeVar("Result")
CHECK_SIGNALS_EVERY = 0.2  # seconds


def run_async(work: Coroutine[object, None, Result]) -> Result:
    """Run a coroutine to its end and return its result, like `asyncio.run`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return reraise(asyncio.run(caught(work)))
    return LoopThread(work).result()


async def caught(work: Coroutine[object, None, Result]) -> Result | KeyboardInterrupt:
    """Return the result of a coroutine, or the interrupt that ended it.

    An interrupt that leaves a task stops the loop itself: asyncio would log a traceback of the task later.
    """
    try:
        return await work
    except KeyboardInterrupt as interrupt:
        return interrupt


def reraise(outcome: Result | KeyboardInterrupt) -> Result:
    if isinstance(outcome, KeyboardInterrupt):
        raise outcome
    return outcome


def mark_retrieved(future: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """Mark the future's exception as retrieved, so that asyncio does not warn if nothing awaits the future."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def cancel_all(*work: asyncio.Future[Result]) -> None:
    """Cancel the futures and ignore their errors."""
    for future in work:
        mark_retrieved(future).cancel()


class LoopThread(Generic[Result]):
    """A thread that runs one coroutine on its own event loop."""

    def __init__(self, work: Coroutine[object, None, Result]) -> None:
        self.work = work
        self.ended: Future[Result] = Future()
        self.interrupted = False
        self.loop: asyncio.AbstractEventLoop | None = None  # set while the coroutine runs
        self.task: asyncio.Task[object] | None = None

    def result(self) -> Result:
        """Run the coroutine and wait for its result; raise KeyboardInterrupt if a signal cancelled it."""
        with forward_signals(self.interrupt):
            threading.Thread(target=self._run, daemon=True, name="openrlhf-event-loop").start()
            while not self.ended.done():  # a signal that the kernel delivers to another thread does not wake this one
                wait([self.ended], timeout=CHECK_SIGNALS_EVERY)
            try:
                return self.ended.result()
            except asyncio.CancelledError:
                if self.interrupted:
                    raise KeyboardInterrupt from None
                raise

    def interrupt(self) -> None:
        """Cancel the coroutine, from the calling thread."""
        self.interrupted = True
        if self.loop is not None and self.task is not None:
            self.loop.call_soon_threadsafe(self.task.cancel)

    def _run(self) -> None:
        try:
            self.ended.set_result(reraise(asyncio.run(caught(self._main()))))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self.ended.set_exception(error)

    async def _main(self) -> Result:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self.interrupted:  # before the loop had started
                self.work.close()
                raise asyncio.CancelledError
            return await self.work
        finally:
            self.loop = None
