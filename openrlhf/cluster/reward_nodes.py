"""Worker processes for the reward function on the other nodes of a cluster.

`ProcessStarter.start_reward_pools` starts a `RewardNode` on each of them: an actor without devices, whose `Pool` has
the node's share of --reward_processes. The driver calls it through a `NodePool`. Agents run on the driver's node only,
because each of their turns is a request to the engines, which the driver sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from openrlhf.agents.build import limits_of, reward_spec
from openrlhf.agents.sandbox.call import CallFailure, CallResult
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.cluster.calls import Process
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.errors import ConfigError


class RewardNode:
    """Actor that runs the reward function in worker processes of its node."""

    pool: Pool

    async def start(self, rewards: RewardFlags, digest: str | None, folder: str) -> float:
        """Load the reward function in a first process; return the number of calls that the pool runs at a time.

        `digest` is that of the file on the driver's node, and `folder` the driver's working directory.
        """
        spec = reward_spec(rewards)
        if digest is None or digest_of(spec.file) != digest:
            raise ConfigError(
                f"{spec.file} is missing here or differs from the file on the driver's node",
                try_this="a file system that all nodes share",
            )
        if Path(folder).is_dir():
            os.chdir(folder)
        self.pool = Pool(spec, limits_of(rewards))
        await asyncio.to_thread(self.pool.start)
        return self.pool.capacity

    async def call(self, given: RewardInput, *, retries: int) -> CallResult | CallFailure:
        """Call the reward function; a failure is returned, because Ray would wrap an exception in one of its own."""
        try:
            return await self.pool.call(given, retries=retries)
        except CallFailure as failure:
            return failure

    async def exit(self) -> None:
        os._exit(0)


@dataclass(frozen=True, eq=False)
class NodePool:
    """The pool of a `RewardNode`, seen from the driver."""

    process: Process[RewardNode]
    capacity: float
    share: int

    def __str__(self) -> str:
        return str(self.process)

    async def call(self, given: RewardInput, *, retries: int) -> CallResult:
        answer = await self.process.call(RewardNode.call, given, retries=retries)
        if isinstance(answer, CallFailure):
            raise answer
        return answer


def digest_of(file: str) -> str | None:
    """Return the checksum of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def share_processes(total: int | None, nodes: int) -> list[int | None]:
    """Divide --reward_processes among nodes, the driver's first; None is the default number on each node."""
    if total is None:
        return [None] * nodes
    return [total // nodes + (number < total % nodes) for number in range(nodes)]
