"""The pools of worker processes that run a reward function: one on this node and, on a cluster, one on each other node.

`FileRewards` calls `RewardPools`, which passes each call to the least busy pool. Deadlines, retries and blame are those
of a pool (`sandbox/pool.py`). A pool that is lost with its node is dropped, and its calls start again in the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from openrlhf.agents.sandbox.call import CallFailure, CallResult
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.errors import DeathError
from openrlhf.monitor import say


class RewardPool(Protocol):
    """Worker processes on another node; in messages, `str` names the pool."""

    @property
    def capacity(self) -> float:
        """Number of calls that run at a time."""
        ...

    @property
    def share(self) -> int:
        """Number of processes that it takes over from the pool on this node; 0 if it has processes of its own."""
        ...

    async def call(self, given: RewardInput, *, retries: int) -> CallResult:
        """Call the reward function; raise CallFailure if it fails, DeathError if the pool is lost."""
        ...


class RewardPools:
    """All pools of a run, with the number of calls that each is running."""

    def __init__(self, local: Pool) -> None:
        self.local = local
        self.running: dict[Pool | RewardPool, int] = {local: 0}
        self.scored: tuple[RewardInput, CallResult] | None = None  # a call that succeeded on this node

    @property
    def capacity(self) -> float:
        """Number of calls that run at a time, in all pools."""
        return sum(pool.capacity for pool in self.running)

    async def add(self, pools: Sequence[RewardPool]) -> None:
        """Use the pools of other nodes, except those on which a call fails or returns something else than on this node.

        The reward function may depend on this node: on a file, a package or a service that other nodes lack.
        """
        works = await asyncio.gather(*map(self._try, pools))
        for pool in (pool for pool, is_usable in zip(pools, works, strict=True) if is_usable):
            self.running[pool] = 0
            self._share_processes(pool.share)
        if len(self.running) > 1:
            say(f"{self.local.spec.name} runs on {len(self.running)} nodes")

    def _share_processes(self, count: int) -> None:
        """Leave this many of the processes on this node to another one, or take them back if it is negative."""
        limits = self.local.limits
        self.local.limits = replace(limits, processes=limits.processes - count)

    async def _try(self, pool: RewardPool) -> bool:
        """Repeat a call that succeeded on this node in a pool; report a failure or another result."""
        try:
            if self.scored is not None:
                given, here = self.scored
                there = await pool.call(given, retries=0)
                if repr(there.result) != repr(here.result):  # `repr`, because NaN does not equal itself
                    say(f"{self.local.spec.name} returns other rewards in {pool} than here: this node is not used")
                    return False
        except CallFailure as failure:
            say(f"{self.local.spec.name} works here but not in {pool}, which is not used: it {failure.text}")
            return False
        except DeathError as error:
            say(f"{error.message}: this node is not used for rewards")
            return False
        return True

    async def call(self, given: RewardInput) -> CallResult:
        """Call the reward function in the least busy pool; if the pool is lost, in another one."""
        while True:
            pool = min(self.running, key=lambda pool: self.running[pool] / pool.capacity)
            self.running[pool] += 1
            try:
                result = await pool.call(given, retries=0)
            except DeathError as error:
                if self.running.pop(pool, None) is not None:  # the first of its calls to notice
                    if not isinstance(pool, Pool):
                        self._share_processes(-pool.share)
                    say(f"{error.message}: its reward calls start again on the other nodes")
            else:
                if pool is self.local:
                    self.scored = self.scored or (given, result)
                return result
            finally:
                if pool in self.running:
                    self.running[pool] -= 1

    async def close(self) -> None:
        """End the processes on this node; those on other nodes end with their actors."""
        await self.local.close()
