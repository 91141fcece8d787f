"""All engines of a run on a cluster behind one interface: routing of requests and replacement of failed engines.

Engines are replaced, and their restarts counted, only here. A failed request replaces its own engine
(`_replace_after`); a failed sync checks all engines (`replace_failed`). In both cases `change_lock` is held until the
new engines have received weights from `weight_sync.RaySync`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from openrlhf.agents.futures import mark_retrieved
from openrlhf.cluster.actors import EngineWorker
from openrlhf.cluster.calls import LOST, RESUME, Process, ProcessWatch
from openrlhf.errors import EngineError, OpenRLHFError, counted
from openrlhf.monitor import say
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.types import Completion, Request

SHORT_CALL = 600.0  # seconds; deadline of calls without generation, long because a busy engine may answer late
SLACK = 32  # requests by which an engine that has the prompt in its cache may exceed the least busy engine


@dataclass
class EngineReplica:
    """One engine; `process` changes when it is replaced after a failure."""

    number: int
    process: Process[EngineWorker]
    running: int = 0  # unfinished requests
    restarts: int = 0
    ready: bool = True  # False while it is being replaced


@dataclass
class RayEngines:
    """All engines as one; a request goes to the engine that has its prompt in the cache, or else to the least busy."""

    engines: Sequence[EngineReplica]
    start: Callable[[int], Awaitable[Process[EngineWorker]]]  # starts a new process for the engine with this number
    watch: ProcessWatch
    max_restarts: int  # per engine
    version: int = 0
    by_prefix: dict[int, EngineReplica] = field(default_factory=dict)  # cached prefixes; cleared at each sync
    change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while engines are replaced or get weights
    send_weights: Callable[[], Awaitable[None]] | None = None  # sends the policy's weights to a new engine

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all completions; unfinished requests of a failed engine are generated again.

        Requests with the same prefix go to the same engine.
        """
        order = sorted(range(len(requests)), key=lambda place: requests[place].prefix)
        groups = [list(places) for _, places in groupby(order, key=lambda place: requests[place].prefix)]
        calls = (self._generate([requests[place] for place in places]) for places in groups)
        answers = await self.watch.guard(asyncio.gather(*calls))
        made = [completion for answer in answers for completion in answer]
        found = dict(zip(order, made, strict=True))
        return [found[place] for place in range(len(requests))]

    async def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate requests of one prefix, and retry them until an engine succeeds."""
        if not self.engines:
            raise EngineError("a replayed run has no engine to generate with", try_this="a run without --replay")
        while True:
            engine = self.choose(requests[0].prefix)
            process = engine.process
            engine.running += len(requests)
            try:
                return await process.call(EngineWorker.generate, list(requests))
            except LOST as failure:
                # The replacement completes even if the request that noticed the failure is cancelled.
                replacing = self.watch.guard(self._replace_after(failure, engine, process))
                await asyncio.shield(mark_retrieved(asyncio.ensure_future(replacing)))
            finally:
                engine.running -= len(requests)

    def choose(self, prefix: int) -> EngineReplica:
        """Return the engine for requests with this prefix id, and remember it."""
        idlest = min(self.engines, key=lambda engine: (not engine.ready, engine.running))
        cached = self.by_prefix.get(prefix, idlest)
        chosen = cached if cached.ready and cached.running <= idlest.running + SLACK else idlest
        self.by_prefix[prefix] = chosen
        return chosen

    async def _replace_after(
        self, failure: OpenRLHFError, engine: EngineReplica, failed: Process[EngineWorker]
    ) -> None:
        """Replace a failed engine unless another request has; requests that lost it wait for the new one's weights."""
        async with self.change_lock:
            if engine.process is failed:
                engine.ready = False
                await self._replace(engine, failure)
                if self.send_weights is not None:
                    await self.send_weights()
                engine.ready = True

    async def replace_failed(self) -> bool:
        """Replace all engines that are dead or unusable, and return whether there were any.

        The caller must hold `change_lock` and send weights afterwards.
        """

        async def replace_if_failed(engine: EngineReplica) -> bool:
            try:
                await engine.process.within(SHORT_CALL).call(EngineWorker.apply, lambda engine: engine.health())
            except LOST as failure:
                await self._replace(engine, failure)
                return True
            return False

        return any(await asyncio.gather(*map(replace_if_failed, self.engines)))

    async def _replace(self, engine: EngineReplica, failure: OpenRLHFError) -> None:
        """Kill the engine's process and start a new one, at most `max_restarts` times."""
        if engine.restarts >= self.max_restarts:
            message = f"{failure.message}, after {counted(engine.restarts, 'restart')} (--max_restarts)"
            raise EngineError(message, try_this=RESUME)
        engine.restarts += 1
        say(f"{failure.message}; restarting the engine and generating its unfinished requests again")
        engine.process.kill()
        engine.process = await self.start(engine.number)

    async def apply(
        self, work: Callable[[LoadingEngine], Awaitable[None]], *, seconds: float | None = SHORT_CALL
    ) -> None:
        """Apply a function, such as one that pauses an engine, to all engines in their processes, and wait for them."""
        calls = (engine.process.within(seconds).call(EngineWorker.apply, work) for engine in self.engines)
        await asyncio.gather(*calls)
