"""The pools of worker processes that run user code on a cluster: one on this node, and one on each other node.

In one process, `FileRewards` and `AgentEpisodes` call the `Pool` of this node. On a cluster, `join_nodes` replaces it
by `NodePools`, which passes each call to the least busy pool. Each pool handles deadlines, retries and the attribution
of crashes (`sandbox/pool.py`). A pool that is lost with its node is dropped, and its calls start again in the others;
an episode then gets the same completions for the same requests, and the engine is not asked again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from openrlhf.agents.sandbox.call import CallFailure, CallResult, Generate
from openrlhf.agents.sandbox.messages import EpisodeInput, RewardInput
from openrlhf.agents.sandbox.pool import Pool, refuse_request
from openrlhf.monitor import say
from openrlhf.types import Completion, Request


class RemotePool(Protocol):
    """Worker processes on another node; in messages, `str` names the pool."""

    @property
    def capacity(self) -> float:
        """Number of calls that run at a time."""
        ...

    @property
    def weight(self) -> float:
        """Share of the calls that it gets, relative to other pools."""
        ...

    @property
    def share(self) -> int:
        """Number of processes that it takes over from this node's pool; 0 if it has its own."""
        ...

    async def call(
        self, given: RewardInput | EpisodeInput, *, retries: int, generate: Generate = refuse_request
    ) -> CallResult:
        """Run user code; raise CallFailure if it fails, PoolLost if the pool is lost."""
        ...


class PoolLost(Exception):
    """A pool on another node died. Not a DeathError: that means that the engine died during a call."""


class NodePools:
    """All pools of a run, with the number of calls that each is running."""

    def __init__(self, local: Pool, others: Sequence[RemotePool]) -> None:
        self.local, self.spec = local, local.spec
        self.running: dict[Pool | RemotePool, int] = {pool: 0 for pool in (local, *others)}
        self._share_processes(sum(pool.share for pool in others))

    @property
    def capacity(self) -> float:
        """Number of calls that run at a time, in all pools."""
        return sum(pool.capacity for pool in self.running)

    def _share_processes(self, count: int) -> None:
        """Give `count` of this node's processes to other nodes; a negative count takes them back."""
        limits = self.local.limits
        self.local.limits = replace(limits, processes=limits.processes - count)

    async def call(
        self, given: RewardInput | EpisodeInput, *, retries: int = 0, generate: Generate = refuse_request
    ) -> CallResult:
        """Run user code in the least busy pool; if the pool is lost, in another one."""
        answers = KeptAnswers(generate)
        while True:
            pool = min(self.running, key=lambda pool: self.running[pool] / pool.weight)
            self.running[pool] += 1
            try:
                return await pool.call(given, retries=retries, generate=answers.start())
            except PoolLost as loss:
                if self.running.pop(pool, None) is not None:  # the first of its calls to notice
                    if not isinstance(pool, Pool):
                        self._share_processes(-pool.share)
                    say(f"{loss}: its calls start again on the other nodes")
            finally:
                if pool in self.running:
                    self.running[pool] -= 1

    async def close(self) -> None:
        """End the processes on this node; those on other nodes end with their actors."""
        await self.local.close()


async def join_nodes(local: Pool, others: Sequence[RemotePool]) -> Pool | NodePools:
    """Join this node's pool with those of other nodes, except those that fail on a call that succeeded on this node.

    User code may depend on this node: on a file, a package or a service that other nodes lack.
    """
    works = await asyncio.gather(*(works_in(pool, local) for pool in others))
    usable = [pool for pool, is_usable in zip(others, works, strict=True) if is_usable]
    if not usable:
        return local
    say(f"{local.spec.name} runs on {len(usable) + 1} nodes")
    return NodePools(local, usable)


async def works_in(pool: RemotePool, local: Pool) -> bool:
    """Repeat in a pool a call that succeeded on this node; report a failure or different rewards.

    An episode gets the same completions, but may still continue differently, because environments may be random.
    """
    if local.worked is None:
        return True
    given, here = local.worked
    known = iter(here.completions)

    async def repeat(request: Request) -> Completion:
        completion = next(known, None)
        if completion is None:
            raise NoMoreCompletions
        return completion

    try:
        there = await pool.call(given, retries=0, generate=repeat)
    except NoMoreCompletions:
        return True
    except CallFailure as failure:
        say(f"{local.spec.name} works here but not in {pool}, which is not used: it {failure.text}")
        return False
    except PoolLost as loss:
        say(f"{loss}: this node is not used for {local.spec.name}")
        return False
    if isinstance(given, RewardInput) and repr(there.result) != repr(here.result):  # NaN does not equal itself
        say(f"{local.spec.name} returns different rewards in {pool} than here: this node is not used")
        return False
    return True


class NoMoreCompletions(Exception):
    """A repeated episode has made more requests than there are recorded completions."""


class KeptAnswers:
    """The engine's answers to the requests of a call, kept in case the call starts again in another pool."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.known: list[tuple[Request, Completion]] = []

    def start(self) -> Generate:
        """Return the function for the requests of a first or repeated attempt."""
        numbers = itertools.count()

        async def ask(request: Request) -> Completion:
            number = next(numbers)
            if number < len(self.known) and self.known[number][0] == request:
                return self.known[number][1]
            completion = await self.generate(request)
            self.known[number:] = [(request, completion)]
            return completion

        return ask
