"""Worker thread for a reward function or agent that a Python caller passes as an object.

A function from a notebook exists only in this process, so it runs here, in a thread with its own event loop. The pool
treats the thread like a process: calls have deadlines and are retried. But a thread cannot be killed. If user code
hangs, its thread is abandoned, and later calls run in a new one; code that ends the process ends the run.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.handle import GRACE_SECONDS, WorkerHandle
from openrlhf.agents.sandbox.worker import Worker


class ThreadedWorker(Worker):
    """Worker that exchanges messages with its handle directly, in the same process."""

    owns_process = False

    def __init__(self, handle: WorkerThread) -> None:
        super().__init__()
        self.handle = handle

    def send(self, message: messages.ToTrainer) -> None:
        with suppress(RuntimeError):  # the thread was abandoned, and the pool's event loop is closed
            self.handle.loop.call_soon_threadsafe(self.handle.receive, message)


class WorkerThread(WorkerHandle):
    """A thread that runs user code."""

    def prepare(self) -> None:
        self.thread_loop = asyncio.new_event_loop()
        self.inbox: asyncio.Queue[messages.ToWorker | None] = asyncio.Queue()  # on the thread's loop; None ends it
        self.thread = threading.Thread(target=self._work, daemon=True, name="openrlhf-user-code")
        self.ended: asyncio.Future[None] = self.loop.create_future()

    def send(self, message: messages.ToWorker) -> None:
        if not self.killed:
            self._post(message)

    def kill(self) -> None:
        """Ask the thread to end, and stop waiting for it."""
        if not self.killed:
            self.killed = True
            self._post(None)
            self.ended.set_result(None)

    def receive(self, message: messages.ToTrainer) -> None:
        """Handle a message, unless it comes from an abandoned thread."""
        if not self.killed:
            self.take(message)

    async def run(self) -> str:
        """Run the thread until `kill` is called."""
        self.thread.start()
        await self.ended
        await asyncio.to_thread(self.thread.join, GRACE_SECONDS)
        return "was stopped"

    def _post(self, message: messages.ToWorker | None) -> None:
        with suppress(RuntimeError):  # the thread's event loop is closed
            self.thread_loop.call_soon_threadsafe(self.inbox.put_nowait, message)

    def _work(self) -> None:
        """Run the worker in the thread; the calls that are still open at its end are cancelled."""
        with asyncio.Runner(loop_factory=lambda: self.thread_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        worker = ThreadedWorker(self)
        worker.track_tasks()
        while (message := await self.inbox.get()) is not None and await worker.take(message):
            pass
