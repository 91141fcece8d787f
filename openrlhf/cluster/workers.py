"""Driver-side access to the models of a run on a cluster.

`RayWorkers` sends each call to the group that holds the model. `WorkerGroup` splits the batches over the group's
data-parallel ranks and collects the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from openrlhf.algo.balance import interleave
from openrlhf.cluster.actors import Standing
from openrlhf.cluster.calls import Fate, Process
from openrlhf.cluster.placement import Group
from openrlhf.config.sections.cluster import Role
from openrlhf.rl.workers import BatchScores, ModelRewards
from openrlhf.types import Batch, PolicyBatch, RolloutBatch, Trajectory


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of one group, with their positions in it."""

    group: Group
    processes: tuple[Process, ...]
    standings: tuple[Standing, ...]
    fate: Fate

    @property
    def ranks(self) -> int:
        return self.standings[0].data_parallel_size

    def firsts(self) -> list[int]:
        """Return the first process of each data-parallel rank; its peers see the same rows and give equal answers."""
        by_rank = {standing.rank: place for place, standing in reversed(list(enumerate(self.standings)))}
        return [by_rank[rank] for rank in range(self.ranks)]

    async def everyone(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every process with the same arguments."""
        return await self.fate.race(asyncio.gather(*(process.call(method, *arguments) for process in self.processes)))

    async def shared_out(self, verb: str, shares: Sequence[object], *arguments: object) -> list[Any]:
        """Call a method of `Models` with one share per data-parallel rank, and return the answers by rank.

        Shares are stored once in Ray's object store, and the processes of a rank get a reference.
        """
        import ray

        references = [ray.put(share) for share in shares]
        calls = (
            process.call("do", verb, references[standing.rank], *arguments)
            for process, standing in zip(self.processes, self.standings, strict=True)
        )
        answers = await self.fate.race(asyncio.gather(*calls))
        return [answers[place] for place in self.firsts()]


class RayWorkers:
    """Models of a run on a cluster; groups on different devices work at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self.groups = groups
        held = {role: self._holding(role) for role in ("actor", "ref", "critic")}
        self.policy, self.reference, self.critic = held["actor"], held["ref"], held["critic"]

    def _holding(self, role: Role) -> WorkerGroup | None:
        return next((group for group in self.groups if role in group.group.roles), None)

    async def score(self, batches: Sequence[RolloutBatch], *, log_probs: bool) -> BatchScores:
        values, reference, own = await asyncio.gather(  # a shared process runs them in this order: see LocalWorkers
            self._scored(self.critic, "values", batches),
            self._scored(self.reference, "reference_log_probs", batches),
            self._scored(self.policy if log_probs else None, "log_probs", batches),
        )
        return BatchScores(own, reference, values)

    async def log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        found = await self._scored(self.policy, "log_probs", batches)
        assert found is not None
        return found

    async def _scored(self, group: WorkerGroup | None, verb: str, batches: Sequence[Batch]) -> list[Tensor] | None:
        """Score the batches in a group and return the results in their order; None without a group."""
        if group is None:
            return None
        places, shares = share_out(batches, group.ranks)
        answers = await group.shared_out(verb, shares)
        found = {
            place: tensor
            for own, answer in zip(places, answers, strict=True)
            for place, tensor in zip(own, answer, strict=False)  # drops the results of filler batches
        }
        return [found[place] for place in range(len(batches))]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards | None:
        scoring = [group for group in self.groups if group.group.rewards]
        if not scoring:
            return None
        return reduce(add, await asyncio.gather(*(self._rewarded(group, trajectories) for group in scoring)))

    async def _rewarded(self, group: WorkerGroup, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return the rewards of one group's reward models, in the order of the trajectories."""
        places, shares = share_trajectories(trajectories, group.ranks)
        answers: list[ModelRewards] = await group.shared_out("rewards", shares)
        parts = [answer.take(range(len(own))) for answer, own in zip(answers, places, strict=True)]
        order = [place for own in places for place in own]
        return ModelRewards.join(parts).take(np.argsort(order).tolist())

    async def train(
        self, micro_batches: Sequence[PolicyBatch], *, kl_coef: float, progress: float, train_policy: bool
    ) -> dict[str, float]:
        steps = [self._trained(self.policy, "train_policy", micro_batches, kl_coef, progress)] if train_policy else []
        if self.critic is not None:
            steps.append(self._trained(self.critic, "train_critic", micro_batches, progress))
        return {name: value for values in await asyncio.gather(*steps) for name, value in values.items()}

    async def _trained(
        self, group: WorkerGroup | None, verb: str, micro_batches: Sequence[PolicyBatch], *arguments: object
    ) -> dict[str, float]:
        """Take one optimizer step in a group and return its metrics."""
        assert group is not None
        answers = await group.shared_out(verb, share_out(micro_batches, group.ranks)[1], *arguments)
        return answers[0]  # metrics are already reduced over the ranks

    async def save(self, folder: Path) -> None:
        await asyncio.gather(*(group.everyone("do", "save", folder.absolute()) for group in self._training()))

    async def load(self, folder: Path) -> None:
        await asyncio.gather(*(group.everyone("do", "load", folder.absolute()) for group in self._training()))

    def _training(self) -> list[WorkerGroup]:
        """Return the groups with trained models, which have checkpoints."""
        return [group for group in self.groups if {"actor", "critic"} & set(group.group.roles)]

    async def export(self, folder: Path) -> None:
        assert self.policy is not None
        await self.policy.everyone("do", "export", folder.absolute())

    async def export_critic(self, folder: Path) -> None:
        assert self.critic is not None
        await self.critic.everyone("do", "export_critic", folder.absolute())


def share_trajectories(
    trajectories: Sequence[Trajectory], ranks: int
) -> tuple[list[list[int]], list[list[Trajectory]]]:
    """Split samples over the ranks with balanced token counts; return their places and the samples, by rank.

    A rank without a sample gets a copy of the shortest one, because the ranks of a sharded model wait for each other.
    """
    lengths = [len(item.input_ids) for item in trajectories]
    places = interleave(lengths, ranks)
    shortest = trajectories[lengths.index(min(lengths))]
    return places, [[trajectories[place] for place in own] or [shortest] for own in places]


def share_out(batches: Sequence[Batch], ranks: int) -> tuple[list[list[int]], list[list[Batch]]]:
    """Split micro-batches over the ranks with balanced token counts; return their places and the batches, by rank.

    The ranks of a sharded model wait for each other, so shorter shares are filled up with a batch of weight zero.
    """
    sizes = [int((batch.sequence_ids >= 0).sum()) for batch in batches]
    places = interleave(sizes, ranks)
    longest = max(map(len, places))
    smallest = batches[min(range(len(batches)), key=lambda place: sizes[place])]
    filler = replace(smallest, filler=True)
    return places, [[batches[place] for place in own] + [filler] * (longest - len(own)) for own in places]
