"""A thread that owns an engine and runs the commands of asyncio callers between the engine's steps.

    event loop of a caller                       the thread, in each iteration
    await engine.load(...)     -> inbox ->       run all pending commands; wait for one if there is nothing to step
    (suspended)                                  take one step
    result or exception        <- future <-      answer the callers whose work is complete

Nothing polls: an idle thread blocks until the next command, and each caller awaits its future in its own event loop.
If the thread itself makes no progress, a watchdog (`progress.py`) raises an error in the callers instead.
`StepLoop` (vllm_loop.py) is the subclass that drives vLLM.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

from openrlhf.errors import EngineError, RolloutError
from openrlhf.rollout.progress import AFTER_STALL, ProgressWatch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound="CommandThread")
Waiter: TypeAlias = Future[Any]  # the answer to one caller, which awaits it in an event loop with `asyncio.wrap_future`
CLOSED = "this engine was closed"
JOIN_SECONDS = 1.0  # seconds between checks of whether a thread that should end is stuck
RECOVERY_SECONDS = 10.0  # time for a stuck thread to recover and end: at exit, Python aborts if it is still in C++ code


class Command(NamedTuple):
    """Work for the thread."""

    work: Callable[[], None]
    waiter: Waiter  # the caller to notify if it fails
    task: str  # its name in messages: "... while TASK"


def on_thread(
    work: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Coroutine[None, None, Result]]:
    """Turn a method that must run on the thread into a coroutine for callers in any event loop.

    A RolloutError of the method is raised in its caller; any other error means that the engine failed.
    """

    @wraps(work)
    async def call(self: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        waiter: Future[Result] = Future()

        def run() -> None:
            try:
                self.answer(waiter, work(self, *args, **kwargs))
            except RolloutError as error:
                self.answer(waiter, error)

        self.post(run, waiter, f"running '{work.__name__}'")
        return await asyncio.wrap_future(waiter)

    return call


class CommandThread(ABC):
    """The thread, its inbox, and the answers to its callers. A subclass defines a step."""

    def __init__(self, name: str, timeout: float = math.inf) -> None:
        """Start the thread, and wait until it has built the engine; errors of `_build` are raised here.

        `name` is the engine's name in messages. After `timeout` seconds without progress, the engine counts as failed.
        A subclass initialises its own state before calling this.
        """
        self.name = name
        self._lock = threading.Lock()  # ensures that no command is queued after the engine is closed
        self._closed = False
        self._failure: EngineError | None = None  # if set, the state of the engine is unknown
        self._waiting: set[Waiter] = set()  # callers whose commands have run but have no answer yet
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None ends the thread
        self._stuck = False  # the thread may never answer again
        self._watch = ProgressWatch(timeout, self._give_up)
        started: Future[None] = Future()
        arguments = (torch.get_num_threads(), started)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name=f"openrlhf-{name}")
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._watch.close()
            raise

    @abstractmethod
    def _build(self) -> None:
        """Build the engine: the first call on the thread."""

    @abstractmethod
    def _may_step(self) -> bool:
        """Return True if there is work to do and the engine may do it now; it may not while paused, for example."""

    @abstractmethod
    def _step(self) -> None:
        """Let the engine take one step, and answer the callers whose work is complete.

        Call `self._watch.progress()` if the step made progress.
        """

    def _step_task(self) -> str:
        """Describe a step, to complete the message "no progress while ..."."""
        return "taking a step"

    @abstractmethod
    def _shut_down(self) -> None:
        """Release the engine: the last call on the thread."""

    def post(self, work: Callable[[], None], waiter: Waiter, task: str = "running a command") -> None:
        """Queue a command for the thread; raise if the engine was closed, or if its thread is stuck."""
        with self._lock:
            if self._stuck and self._failure is not None:
                raise self._failure
            if self._closed:
                raise EngineError(CLOSED)
            self._inbox.put(Command(work, waiter, task))

    def answer(self, waiter: Waiter, result: object) -> None:
        """Pass a result or an exception to a caller. Only the thread may call this, or `_give_up` if it is stuck."""
        self._waiting.discard(waiter)
        with suppress(InvalidStateError):  # cancelled, or answered before
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

    async def health(self) -> None:
        """Raise if the engine failed or was closed, without waiting for the thread, which may be in a long step."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError(CLOSED)

    async def close(self) -> None:
        """Run the commands queued so far, raise an error in callers that still wait, and release the engine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)

        def join() -> None:
            while self._thread.is_alive() and not self._stuck:
                self._thread.join(JOIN_SECONDS)
            self._thread.join(RECOVERY_SECONDS)
            self._watch.close()

        await asyncio.to_thread(join)

    def _give_up(self, problem: str) -> None:
        """Raise an error in all current and future callers, because the thread is stuck in the engine."""
        with self._lock:
            self._failure = EngineError(f"{self.name} hangs: {problem}", try_this=AFTER_STALL)
            self._stuck = True
        for waiter in tuple(self._waiting):
            self.answer(waiter, self._failure)
        with suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    self.answer(command.waiter, self._failure)
        if self._closed:
            self._inbox.put(None)  # the loop above may have removed it; the thread needs it to end if it recovers

    def _run(self, num_threads: int, started: Future[None]) -> None:
        """Build the engine, then alternate between commands and steps until closed: the main function of the thread."""
        torch.set_num_threads(num_threads)  # OpenMP's limit is per thread; the default is every core
        try:
            self._build()
        except Exception as error:  # noqa: BLE001 - any failure must reach the caller that builds the engine
            started.set_exception(error)
            return
        started.set_result(None)
        while self._run_commands():
            if self._failure is None and self._may_step():
                self._guard(self._step, self._step_task())
        for waiter in tuple(self._waiting):
            self.answer(waiter, EngineError(CLOSED))
        self._watch.progress()
        with self._watch.working("shutting down"):
            self._shut_down()

    def _run_commands(self) -> bool:
        """Run all pending commands, and wait for one if there is nothing to step; return False once closed."""
        idle = self._failure is not None or not self._may_step()
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._waiting.add(command.waiter)
            self._watch.progress()
            self._guard(command.work, command.task)
            self._watch.progress()
            idle = False

    def _guard(self, work: Callable[[], None], task: str) -> None:
        """Run `work` unless the engine has failed: after an error its state is unknown, so all waiting callers fail."""
        if self._failure is None:
            try:
                with self._watch.working(task):
                    work()
            except Exception as error:  # noqa: BLE001 - the engine may raise anything, and the callers must not hang
                self._failure = self._failure or EngineError(
                    f"{self.name} failed and cannot generate any more: {error!r}"
                )
                self._failure.__cause__ = error
        if self._failure is not None:
            for waiter in tuple(self._waiting):
                self.answer(waiter, self._failure)
