"""The interface between the RL loop and its runtime: models, engine and weight sync.

`rl/local.py` implements it for one process, `cluster` on Ray; either yields a `Runtime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.agents.node_pools import RemotePool
from openrlhf.plan.gpus import Machine
from openrlhf.rollout.engine import Engine
from openrlhf.types import PolicyBatch, RolloutBatch, StepRewards, Trajectory


@dataclass(frozen=True)
class ModelRewards:
    """Weighted rewards of samples from one or several reward models; `+` adds the rewards of two models."""

    scores: Tensor  # [samples]: one number each; step rewards are reduced to one
    outcomes: Tensor | None  # [samples]: sum over outcome reward models; None if there are none
    steps: list[StepRewards]  # for each sample, the step rewards of process reward models

    def __add__(self, other: ModelRewards) -> ModelRewards:
        outcomes = [given for given in (self.outcomes, other.outcomes) if given is not None]
        return ModelRewards(
            self.scores + other.scores,
            torch.stack(outcomes).sum(0) if outcomes else None,
            [merge_steps(*pair) for pair in zip(self.steps, other.steps, strict=True)],
        )

    def take(self, places: Sequence[int]) -> ModelRewards:
        """Return the rewards of the samples at `places`, in that order."""
        index = torch.tensor(places, dtype=torch.long)
        outcomes = None if self.outcomes is None else self.outcomes[index]
        return ModelRewards(self.scores[index], outcomes, [self.steps[place] for place in places])

    @staticmethod
    def join(parts: Sequence[ModelRewards]) -> ModelRewards:
        """Concatenate the rewards of several sets of samples, all scored by the same models."""
        outcomes = [part.outcomes for part in parts if part.outcomes is not None]
        return ModelRewards(
            torch.cat([part.scores for part in parts]),
            torch.cat(outcomes) if outcomes else None,
            [steps for part in parts for steps in part.steps],
        )


def merge_steps(*given: StepRewards) -> StepRewards:
    """Merge the step rewards of several models in order of position; add rewards at the same position."""
    total: dict[int, float] = {}
    for place, reward in (step for steps in given for step in steps):
        total[place] = total.get(place, 0.0) + reward
    return tuple(sorted(total.items()))


@dataclass(frozen=True)
class BatchScores:
    """Log-probs and values of a rollout: one tensor [rows, tokens] per micro-batch; None if not computed."""

    log_probs: list[Tensor] | None = None
    reference_log_probs: list[Tensor] | None = None
    values: list[Tensor] | None = None


class Workers(Protocol):
    """The models of a run: policy, reference, critic and reward models."""

    async def agree_on_prefixes(self) -> int:
        """Let policy, critic and reference share prefixes if all of them can, so that they round the same way.

        Return the length of the longest sequence that may share its prefix; 0 if none may.
        """
        ...

    async def score(self, batches: Sequence[RolloutBatch], *, log_probs: bool) -> BatchScores:
        """Return reference log-probs and values if those models exist, and the policy's log-probs if requested."""
        ...

    async def log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        """Return the policy's log-probs, one tensor [rows, tokens] per micro-batch."""
        ...

    async def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards | None:
        """Return the sum of the rewards of all reward models, or None without a reward model."""
        ...

    async def train(
        self, micro_batches: Sequence[PolicyBatch], *, kl_coef: float, progress: float, train_policy: bool
    ) -> dict[str, float]:
        """Take one optimizer step of the policy (if `train_policy`) and of the critic (if there is one).

        `progress` is the fraction of the run that is done, in [0, 1); it determines the learning rates.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Save everything needed to resume to an existing, empty folder."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """Export the policy as a Transformers model to an existing, empty folder."""
        ...

    async def export_critic(self, folder: Path) -> None: ...


class WeightSync(Protocol):
    """Transfer of weights from the trainer to the engines."""

    async def sync(self, version: int) -> None:
        """Send the policy's weights to the engines; engines that released shared devices can then generate again."""
        ...

    async def begin_training(self) -> None:
        """Make engines that share devices with the models release them; they cannot generate until the next sync."""
        ...

    async def end_training(self, version: int) -> None:
        """Give the devices back to engines that released them, for instance while a checkpoint was saved.

        Other engines are not affected.
        """
        ...


@dataclass(frozen=True)
class Runtime:
    """Workers, engine, weight sync and additional reward processes of a run, in one process or on a cluster."""

    workers: Workers
    engine: Engine
    sync: WeightSync
    machine: Machine | None = None  # for messages about memory; None if it is not known
    pools: Sequence[RemotePool] = ()  # for the reward function or the agent, on other nodes
