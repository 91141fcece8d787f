"""Sources of rewards for single-turn samples: a user's reward function, or reward servers.

`SingleTurnSamples` calls its source once per group of samples. A reward function runs in workers (`sandbox`): processes
for a file, threads for a Python object. A worker receives the texts of a group and returns their scores. Servers are
called over HTTP (`reward_server`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from openrlhf.agents.executor import clip
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.agents.reward_server import RewardServer
from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.scores import Group, Scored, read_scores
from openrlhf.errors import RewardError, counted

CONCURRENT_REQUESTS = 32  # limit for all reward servers together


class FileRewards:
    """Rewards from the reward_func in a .py file or from a Python function, which is called once per group."""

    def __init__(self, pool: Pool, *, stop_at_failure: bool) -> None:
        self.pool = pool
        self.stop_at_failure = stop_at_failure
        self.origin = pool.spec.name

    async def score(self, group: Group, *, isolate: bool = True) -> list[Scored | RewardError]:
        """Call reward_func on the group. If it fails, find the failing samples if `isolate`, else raise CallFailure."""
        count = len(group.queries)
        labels = [group.prompt.label] * count
        given = RewardInput(list(group.queries), [group.prompt.text] * count, labels, group.seed)
        try:
            returned = (await self.pool.call(given, retries=0)).result
        except CallFailure:
            if isolate:
                return await self._score_without_failing(group)
            raise
        try:
            return read_scores(returned, group, self.origin)
        except RewardError as error:  # the result as a whole is malformed
            return [RewardError(f"{error}; the first sample is {group.describe(0)}")] * count

    async def _score_without_failing(self, group: Group) -> list[Scored | RewardError]:
        """Score samples alone to find those that fail, then the rest together, since reward_func may compare them."""
        indices = range(len(group.queries))

        async def try_alone(index: int) -> RewardError | None:
            try:
                await self.score(group.part([index]), isolate=False)
            except CallFailure as failure:
                error = self._error(failure, group.describe(index))
                if self.stop_at_failure:
                    raise error from None
                return error
            return None

        alone = await gather_or_cancel(map(try_alone, indices))
        scores: dict[int, Scored | RewardError] = {
            index: error for index, error in enumerate(alone) if error is not None
        }
        rest = [index for index in indices if index not in scores]
        if rest:
            try:
                together = await self.score(group.part(rest), isolate=False)
            except CallFailure as failure:
                sample = f"{counted(len(rest), 'sample')} together, the first: {group.describe(rest[0])}"
                together = [self._error(failure, sample)] * len(rest)
            scores |= dict(zip(rest, together, strict=True))
        return [scores[index] for index in indices]

    def _error(self, failure: CallFailure, sample: str) -> RewardError:
        text = failure.text if failure.error_class else f"{self.origin} {failure.text}"
        return failure.to_error(RewardError, f"{text}, for {sample}")


class ServerRewards:
    """Rewards from servers, which are called in turn."""

    def __init__(self, servers: Sequence[RewardServer]) -> None:
        self.servers = itertools.cycle(servers)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.limit = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def score(self, group: Group) -> list[Scored | RewardError]:
        """Score a group on the next server; if that fails, return the error for every sample."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:  # a semaphore works on one event loop only, and the dry run has its own loop
            self.loop, self.limit = loop, asyncio.Semaphore(CONCURRENT_REQUESTS)
        server = next(self.servers)
        count = len(group.queries)
        try:
            async with self.limit:
                answer = await server.score(
                    list(group.queries), [group.prompt.text] * count, [group.prompt.label] * count
                )
            if not isinstance(answer, dict):
                raise RewardError(f"{server.name} answered {clip(repr(answer))}: expected a JSON object")
            return read_scores(answer, group, server.name)
        except RewardError as error:
            return [error] * count
