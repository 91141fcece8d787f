"""All engines of a run on a cluster behind one interface: routing of requests and replacement of failed engines.

Engines are replaced, and their restarts counted, only here. A failed request replaces its own engine (`mend`); a failed
sync checks all engines (`replace_failed`). Both hold the lock `changing` until the new engines have weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from openrlhf.agents.sandbox.loop_thread import heard
from openrlhf.cluster.calls import GO_ON, LOST, Fate, Process
from openrlhf.errors import EngineError, OpenRLHFError
from openrlhf.monitor import say
from openrlhf.rollout.engine import Part
from openrlhf.types import Completion, Request

SLACK = 32  # an engine with the prompt in its cache is preferred up to this many requests above the least busy one


@dataclass
class Engine:
    """One engine; `process` changes when it is replaced after a failure."""

    number: int
    process: Process
    running: int = 0
    restarts: int = 0
    ready: bool = True  # False while it is being replaced


class RayEngines:
    """Engines as one: each request goes to the engine with its prompt in the cache, or else to the least busy one."""

    def __init__(
        self, engines: Sequence[Engine], start: Callable[[int], Awaitable[Process]], fate: Fate, *, max_restarts: int
    ) -> None:
        self.engines = engines
        self.start = start
        self.fate = fate
        self.max_restarts = max_restarts
        self.version = 0
        self.homes: dict[int, Engine] = {}  # engine by prefix id; cleared at each sync, which empties the caches
        self.changing = asyncio.Lock()
        self.bring_weights: Callable[[], Awaitable[None]] | None = None  # sends the policy's weights to a new engine

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all completions; requests that an engine had not finished when it died are generated again.

        Requests with the same prefix go to the same engine.
        """
        order = sorted(range(len(requests)), key=lambda place: requests[place].prefix)
        groups = [list(places) for _, places in groupby(order, key=lambda place: requests[place].prefix)]
        calls = (self._generate([requests[place] for place in places]) for places in groups)
        answers = await self.fate.race(asyncio.gather(*calls))
        made = [completion for answer in answers for completion in answer]
        found = dict(zip(order, made, strict=True))
        return [found[place] for place in range(len(requests))]

    async def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate requests of one prefix, and retry them until an engine succeeds."""
        if not self.engines:
            raise EngineError("there is no engine to generate with", try_this="without --replay")
        while True:
            engine = self.choose(requests[0].prefix)
            process = engine.process
            engine.running += len(requests)
            try:
                return await process.call("generate", list(requests))
            except LOST as failure:
                await self.mend(engine, process, failure)
            finally:
                engine.running -= len(requests)

    def choose(self, prefix: int) -> Engine:
        """Return the engine for requests with this prefix id, and remember it."""
        idlest = min(self.engines, key=lambda engine: (not engine.ready, engine.running))
        home = self.homes.get(prefix, idlest)
        chosen = home if home.ready and home.running <= idlest.running + SLACK else idlest
        self.homes[prefix] = chosen
        return chosen

    async def mend(self, engine: Engine, failed: Process, failure: OpenRLHFError) -> None:
        """Replace a failed engine; the replacement completes even if the request that noticed is cancelled."""
        mending = heard(asyncio.ensure_future(self.fate.race(self._mend(engine, failed, failure))))
        await asyncio.shield(mending)

    async def _mend(self, engine: Engine, failed: Process, failure: OpenRLHFError) -> None:
        """Replace the engine if no other request has done so; the others wait here until it can generate."""
        async with self.changing:
            if engine.process is failed:
                engine.ready = False
                await self._replace(engine, failure)
                if self.bring_weights is not None:
                    await self.bring_weights()
                engine.ready = True

    async def replace_failed(self) -> bool:
        """Replace all engines that are dead or unusable, and return whether there were any.

        The caller must hold `changing` and send weights afterwards.
        """
        return any(await asyncio.gather(*map(self._replace_if_failed, self.engines)))

    async def _replace_if_failed(self, engine: Engine) -> bool:
        try:
            await engine.process.call("do", "health")
        except LOST as failure:
            await self._replace(engine, failure)
            return True
        return False

    async def _replace(self, engine: Engine, failure: OpenRLHFError) -> None:
        """Kill the engine's process and start another, at most `max_restarts` times."""
        if engine.restarts >= self.max_restarts:
            raise EngineError(
                f"{failure.message}, after {engine.restarts} restarts (--max_restarts)",
                try_this=GO_ON,
            )
        engine.restarts += 1
        say(f"{failure.message}; it is started again, and what it had not finished is generated again")
        engine.process.kill()
        engine.process = await self.start(engine.number)

    async def each(self, verb: str, *arguments: object, **named: object) -> None:
        """Call a method of every engine and wait for all of them."""
        await asyncio.gather(*(engine.process.call("do", verb, *arguments, **named) for engine in self.engines))

    async def pause(self, *, drain: bool) -> None:
        await self.each("pause", drain=drain)

    async def resume(self) -> None:
        await self.each("resume")

    async def sleep(self) -> None:
        await self.each("sleep")

    async def wake(self, part: Part) -> None:
        await self.each("wake", part)

    async def health(self) -> None:
        await self.each("health")

    async def close(self) -> None:
        for engine in self.engines:
            engine.process.kill()
