"""Several engines in separate processes behind one interface: route requests, and replace failed engines.

On a cluster, the processes are Ray actors; with --vllm_engines_per_gpu in one process, they are its children.

Engines are replaced, and their restarts counted, only here. A failed request replaces its own engine
(`_replace_after`); a failed sync checks all engines (`replace_failed`). In both cases `change_lock` is held until the
new engines have received weights from `group_sync.GroupSync`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from openrlhf.errors import RESUME, DeathError, EngineError, OpenRLHFError, RolloutError, counted
from openrlhf.event_loop import mark_retrieved
from openrlhf.monitor import say
from openrlhf.rollout.engine_requests import Answer, EngineRequests, Guard
from openrlhf.rollout.engine_worker import EngineProcess, EngineWorker
from openrlhf.rollout.usage import UsageClock
from openrlhf.types import Completion, Request

LOST = (DeathError, EngineError)  # errors of a call after which the engine must be replaced
SHORT_CALL = 600.0  # seconds; deadline of calls without generation, long because a busy engine may answer late
# How many more requests than the least busy engine an engine may have and still be preferred, because its cache holds
# the prompt, or the turns of the episode so far. The turns of an episode may be much longer than a prompt.
PROMPT_SLACK, EPISODE_SLACK = 8, 32


async def unguarded(awaited: Awaitable[Answer]) -> Answer:
    """Await an answer, without watching other processes: for runs that depend only on their engines."""
    return await awaited


@dataclass
class EngineReplica:
    """One engine; `process` changes when it is replaced after a failure."""

    number: int
    process: EngineProcess
    running: int = 0  # unfinished requests
    restarts: int = 0
    ready: bool = True  # False after a replacement, until the new engine has the policy's weights
    requests: EngineRequests | None = None  # of `process`
    busy: UsageClock = field(default_factory=UsageClock)  # runs while the engine has unfinished requests


@dataclass
class EngineGroup:
    """All engines as one; a request goes to the engine that has its prompt in the cache, or else to the least busy."""

    engines: Sequence[EngineReplica]
    start: Callable[[int], Awaitable[EngineProcess]]  # starts a new process for the engine with this number
    max_restarts: int  # per engine
    guard: Guard = unguarded
    version: int = 0
    by_prefix: dict[int, EngineReplica] = field(default_factory=dict)  # cached prompts; cleared at each sync
    by_episode: dict[int, EngineReplica] = field(default_factory=dict)  # cached episodes; cleared at each sync
    change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while engines are replaced or get weights
    send_weights: Callable[[], Awaitable[None]] | None = None  # sends the policy's weights to new engines

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all completions; unfinished requests of a failed engine are generated again."""
        return list(await asyncio.gather(*map(self._generate, requests)))

    @property
    def mean_busy_seconds(self) -> float:
        """Mean seconds in which an engine had unfinished requests."""
        return sum(engine.busy.seconds for engine in self.engines) / max(1, len(self.engines))

    async def _generate(self, request: Request) -> Completion:
        """Generate on one engine, and again on others until one succeeds."""
        if not self.engines:
            raise EngineError("a replayed run has no engine to generate with", try_this="a run without --replay")
        while True:
            engine = self.choose(request)
            process = engine.process
            if engine.requests is None or engine.requests.process is not process:
                engine.requests = EngineRequests(process, self.guard)
            engine.running += 1
            engine.busy.begin()
            try:
                return await engine.requests.generate(request)
            except LOST as failure:
                # The replacement completes even if the request that noticed the failure is cancelled.
                replacing = self.guard(self._replace_after(failure, engine, process))
                await asyncio.shield(mark_retrieved(asyncio.ensure_future(replacing)))
            finally:
                engine.running -= 1
                engine.busy.end()

    def choose(self, request: Request) -> EngineReplica:
        """Return the engine for a request, and remember it."""
        idlest = min(self.engines, key=lambda engine: (not engine.ready, engine.running))
        chosen, episode = idlest, request.episode
        cached = [(self.by_prefix.get(request.prefix), PROMPT_SLACK)]
        if episode is not None:
            cached.insert(0, (self.by_episode.get(episode), EPISODE_SLACK))
        for engine, slack in cached:
            if engine is not None and engine.ready and engine.running <= idlest.running + slack:
                chosen = engine
                break
        self.by_prefix[request.prefix] = chosen
        if episode is not None:
            self.by_episode[episode] = chosen
        return chosen

    def forget_caches(self) -> None:
        """Choose engines without regard to earlier requests, whose keys and values belong to older weights."""
        self.by_prefix.clear()
        self.by_episode.clear()

    async def _replace_after(self, failure: OpenRLHFError, engine: EngineReplica, failed: EngineProcess) -> None:
        """Replace a failed engine unless another request has; requests that lost it wait for the new one's weights."""
        async with self.change_lock:
            if engine.process is not failed:
                return
            engine.ready = False
            try:
                await self._replace(engine, failure)
                if self.send_weights is not None:
                    await self.send_weights()
            except RolloutError as error:  # no sample caused this, so skipping samples would not help
                if isinstance(error, EngineError):
                    raise
                raise EngineError(
                    f"{failure.message}, and was not replaced: {error.message}", try_this=RESUME
                ) from error
            engine.ready = True

    async def replace_failed(self) -> bool:
        """Replace all engines that are dead or unusable, and return whether there were any.

        The caller must hold `change_lock` and send weights afterwards.
        """

        async def replace_if_failed(engine: EngineReplica) -> bool:
            try:
                await engine.process.within(SHORT_CALL).call(EngineWorker.health)
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
        engine.ready = False
        say(f"{failure.message}; restarting the engine and generating its unfinished requests again")
        engine.process.kill()
        engine.process = await self.start(engine.number)

    async def apply(
        self,
        work: Callable[[EngineProcess], Awaitable[None]],
        engines: Sequence[EngineReplica] | None = None,
        *,
        seconds: float | None = SHORT_CALL,
    ) -> None:
        """Make a call, such as a pause, to several engines (default: all) concurrently, and await the answers."""
        chosen = self.engines if engines is None else engines
        await asyncio.gather(*(work(engine.process.within(seconds)) for engine in chosen))
