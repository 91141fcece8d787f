"""An event loop in a thread of its own, and the way back to the loop that called."""

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
    """An event loop that runs beside the caller's."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="openrlhf-agents")
        self.thread.start()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def run_blocking(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def asker(generate: Generate, home: asyncio.AbstractEventLoop) -> Ask:
    """`generate` on the caller's loop, to be asked from the pool's."""

    def ask(request: Request) -> asyncio.Future[Completion]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generate(request), home))

    return ask


def heard(answer: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """An answer whose error asyncio does not complain about where whoever waited for it has gone."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer
