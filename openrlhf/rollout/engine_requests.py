"""The unfinished requests of one engine process: sent in bulk, and answered one by one.

      generate(request)  ->  unsent  --- `submit`, once per iteration of the event loop --->  EngineWorker
          ^                                                                                       |
          +--- the request's future  <--- `collect`: all completions that have finished  <--------+

A call between processes takes longer than the trainer's work on a request, so both directions handle many requests per
call. If the process dies, only the requests that are unfinished at that time fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from itertools import count
from typing import Protocol, TypeVar

from openrlhf.errors import BackendError, OpenRLHFError
from openrlhf.event_loop import mark_retrieved
from openrlhf.rollout.engine_worker import EngineProcess, EngineWorker
from openrlhf.types import Completion, Request

Answer = TypeVar("Answer")


class Guard(Protocol):
    """Await an answer, but raise as soon as a process fails that the run depends on."""

    async def __call__(self, awaited: Awaitable[Answer]) -> Answer: ...


class EngineRequests:
    """Queue of the requests to an engine process: send them in bulk, and deliver their completions."""

    def __init__(self, process: EngineProcess, guard: Guard) -> None:
        self.process, self.guard = process, guard
        self.numbers = count()
        self.unsent: dict[int, Request] = {}
        self.withdrawn: list[int] = []  # cancelled here, and to be cancelled in the process
        self.unanswered: dict[int, asyncio.Future[Completion]] = {}  # includes unsent ones
        self.calls: set[asyncio.Future[None]] = set()  # keeps the futures from being garbage-collected
        self.collecting = False

    async def generate(self, request: Request) -> Completion:
        """Return the completion as soon as it is finished; cancelling the call cancels the request."""
        number = next(self.numbers)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.unanswered[number] = answer
        self.unsent[number] = request
        asyncio.get_running_loop().call_soon(self._send)
        try:
            return await answer
        finally:
            if self.unanswered.pop(number, None) is not None and not self.unsent.pop(number, None):
                self.withdrawn.append(number)  # this call was cancelled
                asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send the requests of this iteration of the event loop."""
        requests, withdrawn = dict(self.unsent), list(self.withdrawn)
        self.unsent.clear()
        self.withdrawn.clear()
        if requests:
            self._start(self._submit(requests))
        if withdrawn:
            self._start(self._withdraw(withdrawn))
        if requests and not self.collecting:
            self.collecting = True
            self._start(self._collect())

    def _start(self, call: Coroutine[object, object, None]) -> None:
        started = mark_retrieved(asyncio.ensure_future(call))
        self.calls.add(started)
        started.add_done_callback(self.calls.discard)

    async def _submit(self, requests: Mapping[int, Request]) -> None:
        try:
            await self.process.call(EngineWorker.submit, requests)
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers must get it
            self._deliver(dict.fromkeys(requests, error))

    async def _withdraw(self, numbers: Sequence[int]) -> None:
        try:
            await self.process.call(EngineWorker.withdraw, numbers)
        except OpenRLHFError:
            return  # the process is gone, and the requests with it

    async def _collect(self) -> None:
        """Deliver completions, and errors of single requests, until no request is left."""

        async def collect() -> Mapping[int, Completion | Exception]:
            try:
                finished = await self.process.call(EngineWorker.collect)
            except Exception as error:  # noqa: BLE001 - the group decides: it may replace this engine
                return dict.fromkeys(self.unanswered.keys() - self.unsent.keys(), error)
            for number, outcome in finished.items():
                if isinstance(outcome, OpenRLHFError):  # name the process, as `call` does for its own errors
                    finished[number] = type(outcome)(f"{self.process}: {outcome.message}", try_this=outcome.try_this)
            return finished

        try:
            while self.unanswered:
                self._deliver(await self.guard(collect()))
        except BackendError as error:  # from the guard: the run cannot continue
            self._deliver(dict.fromkeys(self.unanswered, error))
        finally:
            self.collecting = False

    def _deliver(self, outcomes: Mapping[int, Completion | Exception]) -> None:
        for number, outcome in outcomes.items():
            answer = self.unanswered.pop(number, None)
            if answer is None or answer.done():  # cancelled in the meantime
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
