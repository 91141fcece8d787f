"""An engine in a process of its own, and the interface of that process's handle.

The process is a Ray actor (`cluster/starter.py`) or a child of the trainer (`engine_process.py`). In both cases it runs
an `EngineWorker`, and the trainer calls the worker's methods through an `EngineProcess`:

    await process.call(EngineWorker.pause, drain=True)

The method is passed as the function itself, so that arguments and answers are type-checked across the process boundary.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, Self, TypeVar

if TYPE_CHECKING:  # an engine process answers before it has imported torch
    from openrlhf.rollout.engine import Checksums, LoadingEngine, Part, Weights
    from openrlhf.types import Completion, Request

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class EngineWorker:
    """One engine. If it serves a policy, requests wait for the policy's weights instead of using those on disk."""

    engine: LoadingEngine
    has_weights: asyncio.Event

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
    def address(self) -> str:
        """Address of its machine."""
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
