"""Pool of worker processes that run user code: assigns calls to processes and retries them after crashes.

`FileRewards` and `AgentEpisodes` call it. If a process dies, the call that ended it is blamed and retried alone in a
new process, up to its number of retries; the other calls start again in other processes. If it is unknown which call
ended the process, each reward call starts again in a process without other calls, so the next crash has one cause. The
pool has an event loop in its own thread, because an engine in the trainer's process may block the trainer's loop while
it generates:

    trainer's loop          pool's loop (thread)                     worker process
    Pool.call       ->      _run, _assign -> WorkerProcess.send  ->  Worker.serve -> user code
                    <-      Call.answer   <- WorkerHandle.listen <-  Worker.send
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import deque

from openrlhf.agents.sandbox.call import Call, CallFailure, CallResult, Generate
from openrlhf.agents.sandbox.handle import PoolLimits, WorkerHandle
from openrlhf.agents.sandbox.messages import EpisodeInput, RewardInput, StartCall, WorkerSpec
from openrlhf.agents.sandbox.process import WorkerProcess
from openrlhf.errors import ConfigError, RolloutError
from openrlhf.event_loop import mark_retrieved
from openrlhf.types import Completion, Request

CLOSED = "the worker processes of rewards and agents have been closed"
MOST_UNEXPLAINED = 2  # retries of a call after crashes of unknown cause
CALLS_BEFORE_ANOTHER = 16  # concurrent calls in a process before another process is started


async def refuse_request(request: Request) -> Completion:
    """Reject a request to the engine; used in calls that must not generate."""
    raise RolloutError("a reward function has no access to the engine: only agents can generate")


class Pool:
    """Workers that run one user file or object. All methods below `_stop_thread` run in the pool's own thread."""

    def __init__(self, spec: WorkerSpec, limits: PoolLimits) -> None:
        self.spec, self.limits = spec, limits
        self.workers: list[WorkerHandle] = []
        self.queue: deque[Call] = deque()  # calls that wait for a process
        self.calls: set[Call] = set()  # all unfinished calls
        self.numbers = itertools.count()
        self.max_calls = math.inf  # concurrent calls in a process; further calls are queued
        self.worked: tuple[RewardInput | EpisodeInput, CallResult] | None = None  # the first call that succeeded
        self.closed = False
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="openrlhf-agents")
        self.thread.start()

    def start(self) -> None:
        """Load the file in a first process, which reports how many calls a process can run.

        Raise ConfigError if the file cannot be used.
        """

        async def load() -> None:
            max_calls = (await self._spawn().loaded).max_calls
            self.max_calls = math.inf if max_calls is None else max_calls

        try:
            asyncio.run_coroutine_threadsafe(load(), self.loop).result()
        except CallFailure as failure:
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
            self._stop_thread()
            is_whole = failure.error_class == ConfigError.__name__
            what = self.spec.file if self.spec.code is None else self.spec.name
            text = failure.text if is_whole else f"{what} cannot be loaded: it {failure.text}"
            raise failure.to_error(ConfigError, text) from None

    @property
    def capacity(self) -> float:
        """Number of calls that run at a time."""
        return self.limits.processes * self.max_calls

    @property
    def weight(self) -> float:
        """Share of the calls that it gets, relative to the pools of other nodes: its capacity, if that is finite."""
        return self.limits.processes if self.max_calls == math.inf else self.capacity

    async def call(
        self, given: RewardInput | EpisodeInput, *, retries: int = 0, generate: Generate = refuse_request
    ) -> CallResult:
        """Run user code on its input and return its result, or raise CallFailure.

        A call that crashes its process or times out is retried up to `retries` times. `generate` sends the requests
        of the user code to the engine and runs on the caller's event loop.
        """
        if self.closed:
            raise RolloutError(CLOSED)
        answer = mark_retrieved(self.loop.create_future())
        call = Call(next(self.numbers), given, generate, asyncio.get_running_loop(), retries, answer)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(call), self.loop))

    async def close(self) -> None:
        """Kill all processes, fail the open calls, and stop the thread; may be called more than once."""
        if not self.closed:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self.loop))
            self._stop_thread()

    def _stop_thread(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.fail(CallFailure(CLOSED))
        await asyncio.gather(*(worker.task for worker in self.workers))
        for call in self.queue:
            call.answer.set_exception(RolloutError(CLOSED))
        for call in self.calls:
            for task in call.tasks:  # the engine's answers are no longer needed
                task.cancel()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _run(self, call: Call) -> CallResult:
        """Queue a call and wait for its answer; clean up even if the caller is cancelled."""
        if self.closed:
            raise RolloutError(CLOSED)
        self.calls.add(call)
        try:
            self.queue.append(call)
            self._assign()
            await asyncio.wait({call.answer})
            async with call.engine_turn:  # the session may be closed only after its last request was answered
                answer = call.answer.result()  # raises the call's failure
                requests = [call.requests[number] for number in sorted(call.requests)]
                completions = tuple(request_answer.result() for _, request_answer in requests)
                result = CallResult(answer, completions, tuple(request.params for request, _ in requests))
            self.worked = self.worked or (call.input, result)
            return result
        finally:
            self.calls.remove(call)
            if call in self.queue:
                self.queue.remove(call)
            for worker in self.workers:
                if call.number in worker.calls:  # its user code is still running
                    worker.fail(CallFailure("was given up", given_up=True))
                    del worker.calls[call.number]
            for _, request in call.requests.values():
                request.cancel()

    def _spawn(self, *, alone: bool = False) -> WorkerHandle:
        """Start a process, or a thread for an object; `alone` reserves it for one call."""
        kind: type[WorkerHandle] = WorkerProcess
        if self.spec.code is not None:
            from openrlhf.agents.sandbox.thread import WorkerThread  # late: imports everything that a worker needs

            kind = WorkerThread
        worker = kind(self.spec, self.limits, self._end_call, self._end_process, alone=alone)
        self.workers.append(worker)
        return worker

    def _assign(self) -> None:
        """Assign queued calls to processes, in order, as capacity allows."""
        if self.closed:  # `_close` fails the queued calls; a process started now would never be killed
            return
        while self.queue and (worker := self._find_worker(self.queue[0])) is not None:
            call = self.queue.popleft()
            call.expired = None
            worker.calls[call.number] = call
            worker.send(StartCall(call.number, call.input))  # a process that is still loading reads it later
            worker.start_deadline(call)

    def _find_worker(self, call: Call) -> WorkerHandle | None:
        """Return the least busy process with room for a call, or a new process; None if all processes are full."""
        if call.alone:  # the call crashed a process, so it gets its own
            return self._spawn(alone=True)

        def load(worker: WorkerHandle) -> float:
            shares = self.max_calls == math.inf or not any(other.unexplained for other in worker.calls.values())
            return len(worker.calls) if shares else math.inf

        # A call that may have crashed a process gets its own. Episodes always share processes, so that none is queued:
        # in a run in one process, the engine generates only when all episodes wait for it.
        most = 1 if call.unexplained and self.max_calls < math.inf else self.max_calls
        open_workers = [worker for worker in self.workers if not (worker.alone or worker.retiring or worker.killed)]
        worker = min(open_workers, key=load, default=None)
        may_spawn = len(open_workers) < self.limits.processes
        if worker is None or (may_spawn and load(worker) >= min(CALLS_BEFORE_ANOTHER, most)):
            return self._spawn()
        return worker if load(worker) < most else None

    def _end_call(self, worker: WorkerHandle, call: Call) -> None:
        """Retry a call that ended after its deadline; kill its process if it is no longer needed."""
        if call.expired is not None and not call.answer.done():
            self._retry(call, call.expired)
        if worker.alone or (worker.retiring and not worker.calls):
            worker.kill()
        self._assign()

    def _retry(self, call: Call, failure: CallFailure) -> None:
        """Count a failure against a call; requeue it if retries are left, else fail it."""
        call.failures += 1
        if call.failures > call.retries:
            call.answer.set_exception(failure)
        else:
            self.queue.append(call)

    def _end_process(self, worker: WorkerHandle, failure: CallFailure) -> None:
        """Retry the calls of a process that ended: the call that caused it alone, the others in any process."""
        self.workers.remove(worker)
        for call in worker.calls.values():
            if call.answer.done():  # the engine has failed the call in the meantime
                continue
            if self.closed:
                call.answer.set_exception(RolloutError(CLOSED))
            elif call is worker.blamed:
                call.alone = True
                self._retry(call, failure)
            else:
                call.unexplained += worker.blamed is None and not failure.given_up
                if call.unexplained > MOST_UNEXPLAINED:
                    call.answer.set_exception(failure)
                else:
                    self.queue.append(call)
        self._assign()
