"""Sources of rewards for single-turn samples: a user's reward function, or reward servers.

`SingleTurnSamples` calls its source once per group of samples. A reward function runs in workers (`sandbox`): processes
for a file, threads for a Python object. A worker receives the texts of a group, or of several (`reward_batches`), and
returns their scores. Servers are called over HTTP (`reward_server`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from openrlhf.agents.executor import clip
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.agents.node_pools import NodePools, RemotePool, join_nodes
from openrlhf.agents.reward_batches import GroupBatches
from openrlhf.agents.reward_server import RewardServer
from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.scores import Samples, Scored, read_scores
from openrlhf.errors import RewardError, counted

CONCURRENT_REQUESTS = 32  # limit for all reward servers together


class FileRewards:
    """Rewards from the reward_func in a .py file or from a Python function, which is called with one or more groups.

    `batch_groups` is the maximum number of groups in a call. While `slots` calls are in progress (default: as many as
    the pool runs at a time), groups wait and share the next call; `slots` is unused if `batch_groups` is 1.
    """

    def __init__(self, pool: Pool, *, stop_at_failure: bool, batch_groups: int = 1, slots: float | None = None) -> None:
        self.pool: Pool | NodePools = pool
        self.stop_at_failure = stop_at_failure
        self.origin = pool.spec.name
        self.batches: GroupBatches | None = None
        if batch_groups > 1:
            self.batches = GroupBatches(self.call, batch_groups, lambda: self.pool.capacity if slots is None else slots)

    async def add_pools(self, pools: Sequence[RemotePool]) -> None:
        """Also run the reward function on other nodes; may be called once."""
        assert isinstance(self.pool, Pool)
        self.pool = await join_nodes(self.pool, pools)

    async def call(self, samples: Samples) -> list[Scored | RewardError]:
        """Call reward_func once; raise CallFailure if it fails, RewardError if its result as a whole is malformed."""
        prompts = [prompt.text for prompt in samples.prompts]
        labels = [prompt.label for prompt in samples.prompts]
        given = RewardInput(list(samples.queries), prompts, labels, samples.seed)
        return read_scores((await self.pool.call(given)).result, samples, self.origin)

    async def score(self, group: Samples) -> list[Scored | RewardError]:
        """Score the samples of one prompt, and return an error for each one that fails.

        If the call fails, each sample is tried alone. Those that work are then scored together, since reward_func may
        compare them.
        """
        try:
            return await (self.call(group) if self.batches is None else self.batches.score(group))
        except RewardError as error:
            return self._malformed(error, group)
        except CallFailure:
            indices = range(len(group.queries))

        async def try_sample(index: int) -> RewardError | None:
            try:
                await self.call(group.part([index]))
            except RewardError:  # malformed, but not a failure of this sample
                return None
            except CallFailure as failure:
                error = self._error(failure, group.describe(index))
                if self.stop_at_failure:
                    raise error from None
                return error
            return None

        errors = await gather_or_cancel(map(try_sample, indices))
        scores: dict[int, Scored | RewardError] = {
            index: error for index, error in enumerate(errors) if error is not None
        }
        rest = [index for index in indices if index not in scores]
        if rest:
            try:
                together = await self.call(group.part(rest))
            except RewardError as error:
                together = self._malformed(error, group.part(rest))
            except CallFailure as failure:
                sample = f"{counted(len(rest), 'sample')} together, the first: {group.describe(rest[0])}"
                together = [self._error(failure, sample)] * len(rest)
            scores |= dict(zip(rest, together, strict=True))
        return [scores[index] for index in indices]

    def _malformed(self, error: RewardError, samples: Samples) -> list[Scored | RewardError]:
        """Return the error of a malformed result for each of the samples."""
        return [RewardError(f"{error}; the first sample is {samples.describe(0)}")] * len(samples.queries)

    def _error(self, failure: CallFailure, sample: str) -> RewardError:
        text = failure.text if failure.error_class else f"{self.origin} {failure.text}"
        return failure.to_error(RewardError, f"{text}, for {sample}")


class ServerRewards:
    """Rewards from servers, which are called in turn."""

    def __init__(self, servers: Sequence[RewardServer]) -> None:
        self.servers = itertools.cycle(servers)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.limit = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def score(self, group: Samples) -> list[Scored | RewardError]:
        """Score a group on the next server; if that fails, return the error for every sample."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:  # a semaphore works on one event loop only, and the dry run has its own loop
            self.loop, self.limit = loop, asyncio.Semaphore(CONCURRENT_REQUESTS)
        server = next(self.servers)
        count = len(group.queries)
        try:
            async with self.limit:
                prompts, labels = zip(*((prompt.text, prompt.label) for prompt in group.prompts), strict=True)
                answer = await server.score(list(group.queries), list(prompts), list(labels))
            if not isinstance(answer, dict):
                raise RewardError(f"{server.name} answered {clip(repr(answer))}: expected a JSON object")
            return read_scores(answer, group, server.name)
        except RewardError as error:
            return [error] * count
