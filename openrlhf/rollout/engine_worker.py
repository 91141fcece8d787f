"""An engine in a separate process, and the interface of that process's handle.

The process is a Ray actor (`cluster/starter.py`) or a child of the trainer (`engine_process.py`). In both cases it runs
an `EngineWorker`, and the trainer calls the worker's methods through an `EngineProcess`:

    await process.call(EngineWorker.pause, drain=True)

The method is passed as the function itself, so that arguments and answers are type-checked across the process boundary.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, Self, TypeVar

from openrlhf.errors import OpenRLHFError

if TYPE_CHECKING:  # an engine process answers before it has imported torch
    from openrlhf.rollout.engine import Checksums, LoadingEngine, Part, Weights
    from openrlhf.types import Completion, Request

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class EngineWorker:
    """One engine. If it serves a policy, requests wait for the policy's weights instead of using those on disk."""

    engine: LoadingEngine
    has_weights: asyncio.Event

    def __init__(self) -> None:
        self.tasks: dict[int, asyncio.Task[list[Completion]]] = {}  # submitted requests by their number
        self.finished: dict[int, Completion | OpenRLHFError] = {}  # not collected yet
        self.failure: BaseException | None = None  # unexpected error of a request
        self.may_collect = asyncio.Event()

    async def preload(self, imports: Callable[[], None]) -> None:
        """Import the engine's modules; engines that must start one by one can still import at the same time."""
        imports()

    async def start(self, build: Callable[[], LoadingEngine], awaits_weights: bool) -> None:
        """Build the engine, which loads its model."""
        self.has_weights = asyncio.Event()
        if not awaits_weights:
            self.has_weights.set()
        self.engine = build()
        gc.collect()
        gc.freeze()  # a collection over all imported objects would interrupt a decoding step

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate once the engine has the policy's weights."""
        await self.has_weights.wait()
        return await self.engine.generate(requests)

    async def submit(self, requests: Mapping[int, Request]) -> None:
        """Begin to generate; `collect` returns the completions under the numbers of their requests."""
        for number, request in requests.items():
            task = asyncio.create_task(self.generate([request]))
            self.tasks[number] = task
            task.add_done_callback(partial(self._finish, number))

    def _finish(self, number: int, task: asyncio.Task[list[Completion]]) -> None:
        del self.tasks[number]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            (self.finished[number],) = task.result()
        elif isinstance(error, OpenRLHFError):
            self.finished[number] = error
        else:
            self.failure = error
        self.may_collect.set()

    async def collect(self) -> dict[int, Completion | OpenRLHFError]:
        """Wait until a submitted request has finished; return all that have, completions or their errors."""
        await self.may_collect.wait()
        self.may_collect.clear()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        finished = dict(self.finished)
        self.finished.clear()
        return finished

    async def withdraw(self, numbers: Sequence[int]) -> None:
        """Cancel submitted requests; unknown numbers have finished."""
        for number in numbers:
            if number in self.tasks:
                self.tasks[number].cancel()

    async def load(self, weights: Weights, version: int, verify: bool) -> Checksums:
        """Load the policy's weights and let waiting requests start."""
        checksums = await self.engine.load(weights, version, verify=verify)
        self.has_weights.set()
        return checksums

    async def pause(self, *, drain: bool) -> None:
        await self.engine.pause(drain=drain)

    async def resume(self) -> None:
        await self.engine.resume()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self, part: Part) -> None:
        await self.engine.wake(part)

    async def health(self) -> None:
        await self.engine.health()

    async def ping(self) -> None:
        """Answer, to show that the process reacts."""

    async def close(self) -> None:
        """Release the engine's device memory before the process ends."""
        await self.engine.close()

    async def exit(self) -> None:
        os._exit(0)


class EngineProcess(Protocol):
    """The trainer's handle of a process with an `EngineWorker`; in messages, `str` names it."""

    @property
    def machines(self) -> Sequence[str]:
        """Addresses of the machines that it runs on, its own first."""
        ...

    def within(self, seconds: float | None, timeout_flag: str | None = None) -> Self:
        """Return the same process, with a deadline for its calls; `timeout_flag` is the flag that set it, if any."""
        ...

    async def call(
        self,
        method: Callable[Concatenate[EngineWorker, Arguments], Awaitable[Answer] | Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Call a method of the worker and await its answer.

        An OpenRLHFError of the method keeps its type. The death of the process, or a missed deadline, is a DeathError.
        """
        ...

    def kill(self) -> None:
        """End the process without waiting for it."""
        ...
