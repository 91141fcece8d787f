"""Pool of worker processes that run user code: assigns calls, enforces deadlines, and retries after crashes.

`FileRewards` and `Episodes` call it. If a process dies, the call that ended it is blamed and retried alone in a new
process, up to its number of retries; the other calls of that process start again elsewhere. The pool has an event loop
in its own thread, because an engine in the trainer's process may block the trainer's loop while it generates.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from openrlhf.agents.sandbox.deadline import Deadline
from openrlhf.agents.sandbox.loop_thread import Ask, Generate, LoopThread, asker, heard
from openrlhf.agents.sandbox.messages import Spec
from openrlhf.agents.sandbox.process import Call, Failure, WorkerProcess
from openrlhf.errors import ConfigError, RolloutError
from openrlhf.types import Completion, Request, SamplingParams

GIVEN_UP = "was given up"
CLOSED = "the processes of rewards and agents have been closed"
LOADING_SECONDS = 300.0  # time limit for loading a user's file, mostly its imports
GRACE_SECONDS = 1.0  # for user code to return after it is cancelled
MOST_UNEXPLAINED = 2  # crashes of unknown cause in its process that a call survives; the next one fails it


@dataclass(frozen=True)
class Limits:
    """Concurrency and time limits of a pool."""

    timeout: float  # seconds of user code per call, without waiting for the engine
    processes: int = 1
    calls_before_another: int = 1  # concurrent calls in a process before another process is started
    calls_per_process: int | None = None  # further calls are queued; None: no limit
    loading: float = LOADING_SECONDS  # seconds


@dataclass(frozen=True)
class Reply:
    """The result of user code, and the completions that the engine generated for it, in request order."""

    result: Any
    completions: tuple[Completion, ...]
    params: tuple[SamplingParams, ...]  # one per completion


class Pool:
    """Worker processes that serve one file. All methods below `close` run in the pool's own thread."""

    def __init__(self, spec: Spec, limits: Limits, owns: TemporaryDirectory[str] | None = None) -> None:
        self.spec, self.limits, self.owns = spec, limits, owns
        self.workers: list[WorkerProcess] = []
        self.queue: deque[Call] = deque()
        self.numbers = itertools.count()
        self.loaded: asyncio.Future[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self.thread = LoopThread()

    def start(self) -> None:
        """Load the file in a first process; raise ConfigError if it cannot be used."""
        try:
            self.thread.run_blocking(self._start())
        except ConfigError:
            self.thread.run_blocking(self._close())
            self.thread.stop()
            raise

    async def call(self, body: dict[str, Any], *, retries: int, generate: Generate | None = None) -> Reply:
        """Run user code on `body` and return its reply, or raise Failure.

        A call that crashes its process or times out is retried up to `retries` times. `generate` serves the requests
        of the user code to the engine; it runs on the caller's event loop.
        """
        if self.closed:
            raise RolloutError(CLOSED)
        ask = None if generate is None else asker(generate, asyncio.get_running_loop())
        return await self.thread.run(self._call(body, ask, retries))

    async def close(self) -> None:
        """Kill all processes, fail the open calls, and stop the thread; may be called more than once."""
        if not self.closed:
            await self.thread.run(self._close())
            self.thread.stop()

    async def _start(self) -> None:
        self.loaded = asyncio.get_running_loop().create_future()
        self._spawn()
        await self.loaded

    async def _close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.fail(Failure("died", CLOSED))
        await asyncio.gather(*(worker.life for worker in self.workers))
        for call in self.queue:
            call.answer.set_exception(RolloutError(CLOSED))
        for request in self.tasks:  # their answers are no longer needed
            request.cancel()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)
        if self.owns is not None:
            self.owns.cleanup()

    async def _call(self, body: dict[str, Any], ask: Ask | None, retries: int) -> Reply:
        """Queue a call and wait for its answer; clean up even if the caller is cancelled."""
        if self.closed:
            raise RolloutError(CLOSED)
        call = Call(next(self.numbers), body, ask, retries, heard(asyncio.get_running_loop().create_future()))
        try:
            self.queue.append(call)
            self._assign()
            await asyncio.wait({call.answer})
            async with call.engine_turn:  # the session may be closed only after its last request was answered
                return Reply(call.answer.result(), call.completions(), call.params())
        finally:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """Clean up a call: remove it from the queue, kill a process that still runs it, cancel its requests."""
        if call in self.queue:
            self.queue.remove(call)
        for worker in self.workers:
            if call.number in worker.calls:
                worker.fail(Failure("died", GIVEN_UP))
                del worker.calls[call.number]
        for _, answer in call.asked.values():
            answer.cancel()

    def _spawn(self, *, alone: bool = False) -> WorkerProcess:
        """Start a process with a time limit for loading; `alone` reserves it for one call."""
        worker = WorkerProcess(self.spec, self._hear, self._bury, alone=alone)
        worker.loading = asyncio.get_running_loop().call_later(self.limits.loading, self._too_slow, worker)
        self.workers.append(worker)
        return worker

    def _too_slow(self, worker: WorkerProcess) -> None:
        """Kill a worker that exceeded the time limit for loading."""
        text = f"took longer than {self.limits.loading:g} s to load"
        worker.fail(Failure("loading", text))

    def _assign(self) -> None:
        """Assign queued calls to processes, in order, as capacity allows."""
        waiting, self.queue = self.queue, deque()
        for call in waiting:
            worker = self._room_for(call)
            if worker is None:
                self.queue.append(call)
                continue
            worker.calls[call.number] = call
            if worker.ready:
                self._begin(worker, call)

    def _room_for(self, call: Call) -> WorkerProcess | None:
        """Find or start a process for a call; None if all are full. A call that crashed a process gets its own."""
        if call.alone:
            return self._spawn(alone=True)
        alive = [worker for worker in self.workers if not (worker.alone or worker.retiring or worker.doomed)]
        another = len(alive) < self.limits.processes
        best = min(alive, key=lambda worker: len(worker.calls), default=None)
        if best is None or (another and len(best.calls) >= self.limits.calls_before_another):
            return self._spawn()
        limit = self.limits.calls_per_process
        return best if limit is None or len(best.calls) < limit else None

    def _begin(self, worker: WorkerProcess, call: Call) -> None:
        """Start a call's deadline and send the call to its process."""

        def expire() -> None:
            self._expire(worker, call)

        call.expired = None
        call.deadline = Deadline(call.number, self.limits.timeout, worker.processor, expire)
        worker.send("call", call.number, call.body)

    def _expire(self, worker: WorkerProcess, call: Call) -> None:
        """Stop a call that exceeded its deadline.

        If its code is running, the process is killed. If it only waits, it is cancelled, and other calls in the
        process continue.
        """
        text = f"did not return within {self.limits.timeout:g} s (--reward_timeout)"
        call.expired = Failure("timeout", text)
        worker.retiring = True  # threads of the cancelled call may still run there
        worker.send("cancel", call.number)
        self._insist(worker, call, grace=0.0 if worker.processor.running == call.number else GRACE_SECONDS)

    def _insist(self, worker: WorkerProcess, call: Call, grace: float) -> None:
        """Kill the process if a cancelled call has not returned after `grace` seconds.

        While another call blocks the worker's event loop, the cancellation cannot take effect: check again later.
        """

        def look() -> None:
            if call.number not in worker.calls or worker.doomed or call.expired is None:
                return
            if worker.processor.running in (None, call.number):
                worker.fail(call.expired, call)
            else:
                self._insist(worker, call, GRACE_SECONDS)  # another call blocks the event loop

        asyncio.get_running_loop().call_later(grace, look)

    def _hear(self, worker: WorkerProcess, message: list[Any]) -> None:
        """Handle a message from a worker."""
        kind, *rest = message
        if kind == "ready":
            self._loaded(worker)
        elif kind == "broken":
            worker.fail(Failure(**rest[0]))
        elif kind in ("on", "off"):
            worker.processor.switch(rest[0] if kind == "on" else None, asyncio.get_running_loop().time())
        elif rest[0] in worker.calls:
            self._hear_from(worker, worker.calls[rest[0]], kind, rest[1:])

    def _loaded(self, worker: WorkerProcess) -> None:
        """Start the calls that were assigned to a worker while it was loading."""
        worker.ready = True
        worker.loading.cancel()
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_result(None)
        for call in worker.calls.values():
            self._begin(worker, call)

    def _hear_from(self, worker: WorkerProcess, call: Call, kind: str, rest: list[Any]) -> None:
        """Handle a message about one call: a request to the engine, its result, or its error."""
        if kind == "generate":
            task = asyncio.get_running_loop().create_task(self._generate(worker, call, *rest))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif not call.answer.done():
            if kind == "result":
                call.answer.set_result(rest[0])
            elif call.expired is not None:
                self._blame(call, call.expired)
            else:
                call.answer.set_exception(Failure(**rest[0]))
            self._release(worker, call)

    def _blame(self, call: Call, failure: Failure) -> None:
        """Count a failure against a call; requeue it if retries are left, else fail it."""
        call.failures += 1
        if call.failures > call.retries:
            call.answer.set_exception(failure)
        else:
            self.queue.append(call)

    async def _generate(
        self, worker: WorkerProcess, call: Call, number: int, ids: list[int], params: dict[str, Any]
    ) -> None:
        """Pass a request to the engine, one at a time per episode, with the deadline paused."""
        deadline = call.deadline
        assert deadline is not None
        deadline.pause()
        async with call.engine_turn:
            if call.answer.done():
                return
            answer = call.request(number, request_of(ids, params))
            await asyncio.wait({answer})
        if answer.cancelled():
            call.answer.cancel()
        elif (error := answer.exception()) is not None:
            if not call.answer.done():
                call.answer.set_exception(error)  # an engine's error is not the sample's fault: raise it unchanged
        elif call.number in worker.calls and not worker.doomed:
            deadline.resume()
            worker.send("completion", call.number, number, answer.result())

    def _release(self, worker: WorkerProcess, call: Call) -> None:
        """Remove a finished call from its process; kill the process if it is no longer needed."""
        del worker.calls[call.number]
        if call.deadline is not None:
            call.deadline.stop()
        if worker.alone or (worker.retiring and not worker.calls):
            worker.kill()
        self._assign()

    def _bury(self, worker: WorkerProcess) -> None:
        """Handle the end of a process: blame the call that caused it and restart the others elsewhere."""
        self.workers.remove(worker)
        worker.loading.cancel()
        failure = worker.failure
        assert failure is not None
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(cannot_load(self.spec.file, failure))
        for call in worker.calls.values():
            if call.deadline is not None:
                call.deadline.stop()
            if call.answer.done():  # the engine failed the call in the meantime
                continue
            if self.closed:
                call.answer.set_exception(RolloutError(CLOSED))
            elif call is worker.blamed:
                call.alone = True
                self._blame(call, failure)
            else:
                self._restart(call, failure, explained=worker.blamed is not None or failure.text == GIVEN_UP)
        if not self.closed:
            self._assign()

    def _restart(self, call: Call, failure: Failure, *, explained: bool) -> None:
        """Requeue a call whose process ended; fail it after too many crashes of unknown cause."""
        call.unexplained += not explained
        if call.unexplained > MOST_UNEXPLAINED:
            call.answer.set_exception(failure)
        else:
            self.queue.append(call)


def request_of(ids: list[int], params: dict[str, Any]) -> Request:
    """Build a Request from the JSON that a worker sent."""
    numbers = {name: value for name, value in params.items() if not isinstance(value, list)}
    stops, stop_ids = tuple(params["stop"]), tuple(params["stop_token_ids"])
    return Request(tuple(ids), SamplingParams(**numbers, stop=stops, stop_token_ids=stop_ids))


def cannot_load(file: str, failure: Failure) -> ConfigError:
    """Return the error for a file that failed to load, with the traceback as a note."""
    text = failure.text if failure.kind == "ConfigError" else f"{file} cannot be used: loading it {failure.text}"
    error = ConfigError(text)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error
