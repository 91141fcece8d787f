"""Worker thread for a reward function or agent that a Python caller passes as an object.

A function from a notebook exists only in this process, so it runs here, in a thread with its own event loop. The pool
treats the thread like a process: calls have deadlines and are retried. But a thread cannot be killed. If user code
hangs, its thread is abandoned, and later calls run in a new one; code that ends the process ends the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.handle import GRACE_SECONDS, WorkerHandle
from openrlhf.agents.sandbox.worker import Worker

Message = TypeVar("Message")


class WorkerThread(WorkerHandle):
    """A thread that runs user code."""

    def prepare(self) -> None:
        self.thread_loop = asyncio.new_event_loop()
        # Messages to the worker and to the trainer, each on its receiver's loop; None is the last.
        self.inbox: asyncio.Queue[messages.ToWorker | None] = asyncio.Queue()
        self.outbox: asyncio.Queue[messages.ToTrainer | None] = asyncio.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True, name="openrlhf-user-code")

    def send(self, message: messages.ToWorker) -> None:
        if not self.killed:
            self._post(message)

    def kill(self) -> None:
        """Ask the thread to end, and stop listening to it."""
        if not self.killed:
            self.killed = True
            self._post(None)
            self.outbox.put_nowait(None)

    async def run(self) -> str:
        """Run the thread until `kill` is called."""
        self.thread.start()
        await self.listen(queued(self.outbox))
        await asyncio.to_thread(self.thread.join, GRACE_SECONDS)
        return "was stopped"

    def _post(self, message: messages.ToWorker | None) -> None:
        with suppress(RuntimeError):  # the thread's event loop is closed
            self.thread_loop.call_soon_threadsafe(self.inbox.put_nowait, message)

    def _work(self) -> None:
        """Run the worker in the thread; the calls that are still open at its end are cancelled."""

        def send(message: messages.ToTrainer) -> None:
            with suppress(RuntimeError):  # the thread was abandoned, and the pool's event loop is closed
                self.loop.call_soon_threadsafe(self.outbox.put_nowait, message)

        worker = Worker(send, owns_process=False)
        with asyncio.Runner(loop_factory=lambda: self.thread_loop) as runner:
            runner.run(worker.serve(queued(self.inbox)))


async def queued(queue: asyncio.Queue[Message | None]) -> AsyncIterator[Message]:
    """Yield the messages of a queue up to None."""
    while (message := await queue.get()) is not None:
        yield message
