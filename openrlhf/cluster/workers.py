"""Driver-side access to the models of a run on a cluster.

`RayWorkers` sends each call to the group that holds the model. `WorkerGroup` splits the batches over the group's
data-parallel ranks and collects the answers. The ranks of a sharded model wait for each other, so all of them get
the same number of batches.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
from torch import Tensor

from openrlhf.algo.balance import interleave, karmarkar_karp
from openrlhf.cluster.actors import ModelWorker, RankInfo
from openrlhf.cluster.calls import Process, ProcessWatch
from openrlhf.config.worker_groups import GroupPlan
from openrlhf.data.shared_prefixes import PrefixGroup
from openrlhf.rl.models import Models
from openrlhf.rl.samples import divide_groups
from openrlhf.rl.workers import BatchScores, ModelRewards
from openrlhf.training.backend import B
from openrlhf.types import PolicyBatch, RolloutBatch, Trajectory

Answer = TypeVar("Answer")
Share = TypeVar("Share")  # the work of one data-parallel rank
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of one group, with their positions in it."""

    group: GroupPlan
    processes: Sequence[Process[ModelWorker]]
    positions: Sequence[RankInfo]  # one per process
    watch: ProcessWatch

    @property
    def ranks(self) -> int:
        return self.positions[0].data_parallel_size

    async def call_all(self, method: Callable[[Models, *Arguments], Answer], *arguments: *Arguments) -> list[Answer]:
        """Call a method of `Models` in every process with the same arguments."""
        calls = (process.call(ModelWorker.apply, method, *arguments) for process in self.processes)
        return await self.watch.guard(asyncio.gather(*calls))

    async def call_shared(
        self, method: Callable[[Models, Share, *Arguments], Answer], shares: Sequence[Share], *arguments: *Arguments
    ) -> list[Answer]:
        """Call a method of `Models` with one share per data-parallel rank, and return the answers by rank.

        Shares are stored once in Ray's object store, and the processes of a rank get a reference. They process the same
        rows and return equal answers, so only the answer of the first is used.
        """
        import ray

        references = [await asyncio.to_thread(ray.put, share) for share in shares]  # copies all tokens
        calls = (
            process.call(ModelWorker.apply, method, references[position.rank], *arguments)
            for process, position in zip(self.processes, self.positions, strict=True)
        )
        answers = await self.watch.guard(asyncio.gather(*calls))
        ranks = [position.rank for position in self.positions]
        return [answers[ranks.index(rank)] for rank in range(self.ranks)]


class RayWorkers:
    """Models of a run on a cluster; groups on different devices work at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        by_role = {role: group for group in groups for role in group.group.roles}
        self.groups = groups
        self.policy = by_role["actor"]
        self.others = [group for group in groups if group is not self.policy]
        self.reference, self.critic = by_role.get("ref"), by_role.get("critic")
        # The groups with trained models, which have checkpoints.
        self.trained = [group for group in groups if {"actor", "critic"} & set(group.group.roles)]

    async def agree_on_prefixes(self) -> int:
        answers = await asyncio.gather(*(group.call_all(Models.sharing_limit) for group in self.groups))
        limit = min(min(answer) for answer in answers)
        if not limit:
            await asyncio.gather(*(group.call_all(Models.share_no_prefixes) for group in self.groups))
        return limit

    async def score(self, batches: Sequence[RolloutBatch], *, log_probs: bool) -> BatchScores:
        values, reference, own = await asyncio.gather(  # policy last, as in LocalWorkers
            self._score(self.critic, Models.values, batches),
            self._score(self.reference, partial(Models.log_probs, of_reference=True), batches),
            self._score(self.policy if log_probs else None, Models.log_probs, batches),
        )
        return BatchScores(own, reference, values)

    async def log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        return await self._score(self.policy, Models.log_probs, batches) or []

    async def _score(
        self,
        group: WorkerGroup | None,
        method: Callable[[Models, Sequence[RolloutBatch]], list[Tensor]],
        batches: Sequence[RolloutBatch],
    ) -> list[Tensor] | None:
        """Score the batches in a group and return the results in batch order; None without a group."""
        if group is None:
            return None
        places, shares = share_out(batches, group.ranks)
        answers = await group.call_shared(method, shares)
        found = {
            place: tensor
            for own, answer in zip(places, answers, strict=True)
            for place, tensor in zip(own, answer, strict=False)  # drops the results of filler batches
        }
        return [found[place] for place in range(len(batches))]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards | None:
        async def score_in(group: WorkerGroup) -> ModelRewards:
            """Return the rewards of one group's reward models, in the order of the trajectories."""
            places, shares = share_trajectories(trajectories, group.ranks)
            answers = await group.call_shared(Models.rewards, shares)
            parts = [answer.take(range(len(own))) for answer, own in zip(answers, places, strict=True)]
            order = [place for own in places for place in own]
            return ModelRewards.join(parts).take(np.argsort(order).tolist())

        scoring = [group for group in self.groups if group.group.rewards]
        return reduce(add, await asyncio.gather(*map(score_in, scoring))) if scoring else None

    async def train(
        self, micro_batches: Sequence[PolicyBatch], *, kl_coef: float, progress: float, train_policy: bool
    ) -> dict[str, float]:
        steps = []
        if train_policy:
            _, shares = share_out(micro_batches, self.policy.ranks)
            steps.append(self.policy.call_shared(Models.train_policy, shares, kl_coef, progress))
        if self.critic is not None:
            _, shares = share_out(micro_batches, self.critic.ranks)
            steps.append(self.critic.call_shared(Models.train_critic, shares, progress))
        # Metrics are already reduced over the ranks, so those of the first rank suffice.
        return {name: value for answers in await asyncio.gather(*steps) for name, value in answers[0].items()}

    async def save(self, folder: Path) -> None:
        await asyncio.gather(*(group.call_all(Models.save, folder.absolute()) for group in self.trained))

    async def load(self, folder: Path) -> None:
        await asyncio.gather(*(group.call_all(Models.load, folder.absolute()) for group in self.trained))

    async def export(self, folder: Path) -> None:
        await self.policy.call_all(Models.export, folder.absolute())

    async def export_critic(self, folder: Path) -> None:
        if self.critic is not None:
            await self.critic.call_all(Models.export_critic, folder.absolute())


def share_trajectories(
    trajectories: Sequence[Trajectory], ranks: int
) -> tuple[list[list[int]], list[list[Trajectory]]]:
    """Split samples over the ranks with balanced token counts; return their indices and the samples, by rank.

    Samples of a prompt stay together if the balance allows, because a model may then compute their prompt only once. A
    rank without a sample gets a copy of the shortest one, because the ranks of a sharded model wait for each other.
    """
    lengths = [len(item.input_ids) for item in trajectories]
    by_prompt: dict[int, list[int]] = {}
    for place, item in enumerate(trajectories):
        by_prompt.setdefault(item.prompt.index, []).append(place)
    groups = divide_groups([PrefixGroup(0, own) for own in by_prompt.values()], lengths, sys.maxsize, ranks)
    shares = karmarkar_karp([sum(lengths[place] for place in group.members) for group in groups], ranks)
    places = [[place for number in share for place in groups[number].members] for share in shares]
    shortest = trajectories[lengths.index(min(lengths))]
    return places, [[trajectories[place] for place in own] or [shortest] for own in places]


def share_out(batches: Sequence[B], ranks: int) -> tuple[list[list[int]], list[list[B]]]:
    """Split micro-batches over the ranks with balanced token counts; return their indices and the batches, by rank.

    The ranks of a sharded model wait for each other, so shorter shares are padded with filler batches.
    """
    sizes = [int(batch.lengths.sum()) if batch.prefixes is None else len(batch.prefixes.kept) for batch in batches]
    places = interleave(sizes, ranks)
    longest = max(map(len, places))
    smallest = batches[min(range(len(batches)), key=lambda place: sizes[place])]
    filler = replace(smallest, filler=True)
    return places, [[batches[place] for place in own] + [filler] * (longest - len(own)) for own in places]
