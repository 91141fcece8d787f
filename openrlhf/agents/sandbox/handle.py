"""Trainer-side handle of a worker: send it calls, enforce their deadlines, pass on their requests to the engine.

The pool assigns calls to a `WorkerHandle`, which reports the end of each call and of the worker through callbacks. User
code from a file runs in a process (`process.WorkerProcess`), and an object of a Python caller in a thread
(`thread.WorkerThread`). Both are subclasses, which start the worker, carry its messages and end it. All methods run on
the pool's event loop; `worker.Worker` is the other end.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.call import Call, CallFailure
from openrlhf.agents.sandbox.deadline import Deadline, LoopUsage
from openrlhf.event_loop import mark_retrieved
from openrlhf.types import Request, SamplingParams

GRACE_SECONDS = 1.0  # time for user code to return after it is cancelled
LOADING_SECONDS = 300.0  # time limit for loading a user's file, mostly its imports


@dataclass(frozen=True)
class PoolLimits:
    """Concurrency and time limits of a pool."""

    timeout: float  # seconds of user code per call, excluding waits for the engine
    processes: int = 1


class WorkerHandle(ABC):
    """A worker that runs user code, and the calls assigned to it.

    `on_call_end` is called when user code has returned or raised; if the call has no answer by then, it has expired.
    `on_exit` is called once, after the worker has ended and `failure` and `blamed` are set.
    """

    def __init__(
        self,
        spec: messages.WorkerSpec,
        limits: PoolLimits,
        on_call_end: Callable[[WorkerHandle, Call], None],
        on_exit: Callable[[WorkerHandle, CallFailure], None],
        *,
        alone: bool = False,
    ) -> None:
        self.limits, self.on_call_end, self.on_exit, self.alone = limits, on_call_end, on_exit, alone
        self.calls: dict[int, Call] = {}  # calls sent but not yet answered, by number
        self.deadlines: dict[int, Deadline] = {}  # deadlines of these calls, once the user code is loaded
        self.usage = LoopUsage()
        self.retiring = False  # True: no further calls are assigned
        self.killed = False  # ended, or to be ended once started
        self.failure: CallFailure | None = None  # why it was ended, or how it ended
        self.blamed: Call | None = None  # the call that caused `failure`, if known
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[messages.FileLoaded] = mark_retrieved(self.loop.create_future())
        too_slow = CallFailure(f"took longer than {LOADING_SECONDS:g} s to load")
        self.loading = self.loop.call_later(LOADING_SECONDS, self.fail, too_slow)
        self.prepare()
        self.send(spec)
        self.task = self.loop.create_task(self._run_and_report())

    @abstractmethod
    def prepare(self) -> None:
        """Set the attributes of the subclass; called before the first message."""

    @abstractmethod
    def send(self, message: messages.ToWorker) -> None:
        """Send a message, unless the worker is being ended."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, no matter what its user code is doing; may be called more than once."""

    @abstractmethod
    async def run(self) -> str:
        """Start the worker and pass its messages to `listen`; return how it ended, as the rest of a sentence."""

    def fail(self, failure: CallFailure, blamed: Call | None = None) -> None:
        """End the worker, and record the cause and the call to blame."""
        if self.failure is None:
            self.failure, self.blamed = failure, blamed
        self.kill()

    def start_deadline(self, call: Call) -> None:
        """Start the deadline of a call; if the user code is still loading, `listen` starts it later."""
        if self.loaded.done():
            self.deadlines[call.number] = Deadline(
                call.number, self.limits.timeout, self.usage, lambda: self._stop_expired(call)
            )

    def _stop_expired(self, call: Call) -> None:
        """Stop a call that exceeded its deadline.

        If its code is running, the worker is ended. If it only waits, it is cancelled, and other calls of the worker
        continue; the worker is ended if the call has not returned after GRACE_SECONDS. A worker whose calls run in
        threads abandons the call's thread; if even that fails, any of its calls may be holding the interpreter.
        """
        call.expired = expired = CallFailure(f"did not return within {self.limits.timeout:g} s (--reward_timeout)")
        self.retiring = True  # threads of the cancelled call may still run
        self.send(messages.CancelCall(call.number))

        def kill_unless_ended() -> None:
            if call.number not in self.calls or self.killed:
                return
            if self.loaded.result().uses_threads and len(self.calls) > 1:
                self.fail(expired)
            elif self.usage.running in (None, call.number):
                self.fail(expired, call)
            else:  # another call blocks the event loop, so the cancellation cannot take effect yet
                self.loop.call_later(GRACE_SECONDS, kill_unless_ended)

        self.loop.call_later(0.0 if self.usage.running == call.number else GRACE_SECONDS, kill_unless_ended)

    async def _run_and_report(self) -> None:
        """Run the worker until it exits, then tell the pool why it ended and which call caused that."""
        problem = await self.run()
        if self.failure is None:
            self.failure = CallFailure(problem)
            if self.usage.running in self.calls:
                self.blamed = self.calls[self.usage.running]
            elif self.loaded.done() and len(self.calls) == 1:
                (self.blamed,) = self.calls.values()
        self.loading.cancel()
        for deadline in self.deadlines.values():
            deadline.stop()
        if not self.loaded.done():
            self.loaded.set_exception(self.failure)
        self.on_exit(self, self.failure)

    async def listen(self, received: AsyncIterator[messages.ToTrainer]) -> None:
        """Handle the messages from the worker until they end."""
        async for message in received:
            number = None if isinstance(message, messages.FileLoaded) else message.call
            call = None if number is None else self.calls.get(number)
            match message:
                case messages.RunningCall():
                    self.usage.switch(message.call, self.loop.time())
                case messages.FileLoaded():
                    self.loading.cancel()
                    self.loaded.set_result(message)
                    for waiting in self.calls.values():
                        self.start_deadline(waiting)
                case messages.CallRaised(call=None):
                    self.fail(CallFailure(message.text, message.traceback, message.error_class))
                case messages.EngineRequest() if call is not None:
                    task = self.loop.create_task(self._ask_engine(call, self.deadlines[call.number], message))
                    call.tasks.add(task)
                    task.add_done_callback(call.tasks.discard)
                case messages.CallReturned() | messages.CallRaised() if call is not None and not call.answer.done():
                    if isinstance(message, messages.CallReturned):
                        call.answer.set_result(message.result)
                    elif call.expired is None:
                        failure = CallFailure(message.text, message.traceback, message.error_class)
                        call.answer.set_exception(failure)
                    del self.calls[call.number]
                    self.deadlines.pop(call.number).stop()
                    self.on_call_end(self, call)

    async def _ask_engine(self, call: Call, deadline: Deadline, message: messages.EngineRequest) -> None:
        """Pass a request to the engine, one at a time per episode, with the call's deadline paused."""
        deadline.pause()
        params: dict[str, Any] = message.params | {
            name: tuple(message.params[name]) for name in ("stop", "stop_token_ids")
        }
        request = Request(tuple(message.token_ids), SamplingParams(**params))
        async with call.engine_turn:
            if call.answer.done():
                return
            answer = call.ask_engine(message.request, request)
            await asyncio.wait({answer})
        if answer.cancelled():
            call.answer.cancel()
        elif (error := answer.exception()) is not None:
            if not call.answer.done():
                call.answer.set_exception(error)  # the sample did not cause this error, so raise it unchanged
        elif call.number in self.calls and not self.killed:
            deadline.resume()
            told = replace(answer.result(), routed_experts=None)  # only the trainer needs them
            self.send(messages.EngineAnswer(call.number, message.request, told))
