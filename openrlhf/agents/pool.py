"""User code in processes of its own: calls go out, deadlines hold, and a process that fails takes nobody with it.

The pool has an event loop in a thread of its own, because an engine in the trainer's process may hold the trainer's
loop for as long as it generates.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from openrlhf.agents.deadline import Deadline
from openrlhf.agents.loop_thread import Ask, Generate, LoopThread, asker, heard
from openrlhf.agents.messages import Spec
from openrlhf.agents.process import Call, Failure, WorkerProcess
from openrlhf.errors import ConfigError, RolloutError
from openrlhf.types import Completion, Request, SamplingParams

GIVEN_UP = "was given up"
CLOSED = "the processes of rewards and agents have been closed"
LOADING_SECONDS = 300.0  # for the imports of a user's file
GRACE_SECONDS = 1.0  # for user code to come back when it is cancelled
MOST_UNEXPLAINED = 2  # ends of a process that a call gets over when nobody can tell whose fault they were


@dataclass(frozen=True)
class Limits:
    """How much a pool does at once, and how long user code may take."""

    timeout: float  # seconds of user code, per call
    processes: int = 1
    calls_before_another: int = 1  # in a process, before another one is started
    calls_per_process: int | None = None  # more wait; None: no limit
    loading: float = LOADING_SECONDS


@dataclass(frozen=True)
class Reply:
    """What user code returned, and what the engine drew for it and how, in the order it was asked."""

    result: Any
    completions: tuple[Completion, ...]
    params: tuple[SamplingParams, ...]  # of each completion


class Pool:
    """Worker processes that serve one file. Everything below `close` runs in the pool's own thread."""

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
        """Loads the file in a first process; a file that cannot be used is a ConfigError."""
        try:
            self.thread.run_blocking(self._start())
        except ConfigError:
            self.thread.run_blocking(self._close())
            self.thread.stop()
            raise

    async def call(self, body: dict[str, Any], *, retries: int, generate: Generate | None = None) -> Reply:
        """The answer of user code, or a Failure; a call that ended its process is tried again `retries` times."""
        if self.closed:
            raise RolloutError(CLOSED)
        ask = None if generate is None else asker(generate, asyncio.get_running_loop())
        return await self.thread.run(self._call(body, ask, retries))

    async def close(self) -> None:
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
        for request in self.tasks:  # an engine that is asked no more need not answer
            request.cancel()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)
        if self.owns is not None:
            self.owns.cleanup()

    async def _call(self, body: dict[str, Any], ask: Ask | None, retries: int) -> Reply:
        if self.closed:
            raise RolloutError(CLOSED)
        call = Call(next(self.numbers), body, ask, retries, heard(asyncio.get_running_loop().create_future()))
        try:
            self.queue.append(call)
            self._assign()
            await asyncio.wait({call.answer})
            async with call.engine_turn:  # a session can be closed only when its last request has been answered
                return Reply(call.answer.result(), call.completions(), call.params())
        finally:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """A call that nobody waits for any more leaves nothing running."""
        if call in self.queue:
            self.queue.remove(call)
        for worker in self.workers:
            if call.number in worker.calls:
                worker.fail(Failure("died", GIVEN_UP))
                del worker.calls[call.number]
        for _, answer in call.asked.values():
            answer.cancel()

    def _spawn(self, *, alone: bool = False) -> WorkerProcess:
        worker = WorkerProcess(self.spec, self._hear, self._bury, alone=alone)
        worker.loading = asyncio.get_running_loop().call_later(self.limits.loading, self._too_slow, worker)
        self.workers.append(worker)
        return worker

    def _too_slow(self, worker: WorkerProcess) -> None:
        text = f"took longer than {self.limits.loading:g} s to load"
        worker.fail(Failure("loading", text))

    def _assign(self) -> None:
        """Gives waiting calls to processes, in order, as far as there is room."""
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
        """A process for this call. One that has ended a process before gets one for itself."""
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
        def expire() -> None:
            self._expire(worker, call)

        call.expired = None
        call.deadline = Deadline(call.number, self.limits.timeout, worker.processor, expire)
        worker.send("call", call.number, call.body)

    def _expire(self, worker: WorkerProcess, call: Call) -> None:
        """Kills what holds the processor; what merely waits is cancelled, and its neighbours go on undisturbed."""
        text = f"did not return within {self.limits.timeout:g} s (--reward_timeout)"
        call.expired = Failure("timeout", text)
        worker.retiring = True  # threads of what was cancelled may go on there
        worker.send("cancel", call.number)
        self._insist(worker, call, grace=0.0 if worker.processor.running == call.number else GRACE_SECONDS)

    def _insist(self, worker: WorkerProcess, call: Call, grace: float) -> None:
        def look() -> None:
            if call.number not in worker.calls or worker.doomed or call.expired is None:
                return
            if worker.processor.running in (None, call.number):
                worker.fail(call.expired, call)
            else:
                self._insist(worker, call, GRACE_SECONDS)  # a neighbour keeps it from hearing

        asyncio.get_running_loop().call_later(grace, look)

    def _hear(self, worker: WorkerProcess, message: list[Any]) -> None:
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
        worker.ready = True
        worker.loading.cancel()
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_result(None)
        for call in worker.calls.values():
            self._begin(worker, call)

    def _hear_from(self, worker: WorkerProcess, call: Call, kind: str, rest: list[Any]) -> None:
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
        """One more try, or the end of it."""
        call.failures += 1
        if call.failures > call.retries:
            call.answer.set_exception(failure)
        else:
            self.queue.append(call)

    async def _generate(
        self, worker: WorkerProcess, call: Call, number: int, ids: list[int], params: dict[str, Any]
    ) -> None:
        """Asks the engine, one request of an episode after the other, while the episode's clock stands still."""
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
                call.answer.set_exception(error)  # the engine's own error is no sample's fault and goes up as it is
        elif call.number in worker.calls and not worker.doomed:
            deadline.resume()
            worker.send("completion", call.number, number, answer.result())

    def _release(self, worker: WorkerProcess, call: Call) -> None:
        del worker.calls[call.number]
        if call.deadline is not None:
            call.deadline.stop()
        if worker.alone or (worker.retiring and not worker.calls):
            worker.kill()
        self._assign()

    def _bury(self, worker: WorkerProcess) -> None:
        """The call that ended the process is blamed, the others begin again elsewhere."""
        self.workers.remove(worker)
        worker.loading.cancel()
        failure = worker.failure
        assert failure is not None
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(cannot_load(self.spec.file, failure))
        for call in worker.calls.values():
            if call.deadline is not None:
                call.deadline.stop()
            if call.answer.done():  # the engine failed it meanwhile
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
        call.unexplained += not explained
        if call.unexplained > MOST_UNEXPLAINED:
            call.answer.set_exception(failure)
        else:
            self.queue.append(call)


def request_of(ids: list[int], params: dict[str, Any]) -> Request:
    numbers = {name: value for name, value in params.items() if not isinstance(value, list)}
    stops, stop_ids = tuple(params["stop"]), tuple(params["stop_token_ids"])
    return Request(tuple(ids), SamplingParams(**numbers, stop=stops, stop_token_ids=stop_ids))


def cannot_load(file: str, failure: Failure) -> ConfigError:
    text = failure.text if failure.kind == "ConfigError" else f"{file} cannot be used: loading it {failure.text}"
    error = ConfigError(text)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error
