"""An event loop in its own thread, and helpers to cross between it and the caller's loop.

The worker pool runs here, so that it keeps serving its processes while the trainer's loop is blocked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from openrlhf.types import Completion, Request

Generate = Callable[[Request], Coroutine[Any, Any, Completion]]
Ask = Callable[[Request], asyncio.Future[Completion]]
Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="openrlhf-agents")
        self.thread.start()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread's loop and await its result on the caller's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def run_blocking(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread's loop and block until it returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def asker(generate: Generate, home: asyncio.AbstractEventLoop) -> Ask:
    """Wrap `generate`, which must run on the loop `home`, for calls from the pool's loop."""

    def ask(request: Request) -> asyncio.Future[Completion]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generate(request), home))

    return ask


def heard(answer: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """Mark the future's exception as retrieved, so that asyncio does not warn if the waiting task has gone."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer
