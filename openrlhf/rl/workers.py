"""What the loop asks of the models: small verbs that one process and a cluster both fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.types import Batch, StepRewards, Trajectory

Metrics = dict[str, float]


@dataclass(frozen=True)
class ModelRewards:
    """What reward models give to samples, already weighted. `+` is what two models give together."""

    scores: Tensor  # [samples]: one number each; a process reward model's steps are reduced to one
    outcomes: Tensor | None  # [samples]: the share of models that judge whole samples; None without such a model
    steps: list[StepRewards]  # per sample: the share of models that judge steps

    def __add__(self, other: ModelRewards) -> ModelRewards:
        outcomes = [given for given in (self.outcomes, other.outcomes) if given is not None]
        return ModelRewards(
            self.scores + other.scores,
            torch.stack(outcomes).sum(0) if outcomes else None,
            [merge_steps(*pair) for pair in zip(self.steps, other.steps, strict=True)],
        )

    def take(self, places: Sequence[int]) -> ModelRewards:
        """The rewards of some samples, in the order of `places`."""
        index = torch.tensor(places, dtype=torch.long)
        outcomes = None if self.outcomes is None else self.outcomes[index]
        return ModelRewards(self.scores[index], outcomes, [self.steps[place] for place in places])

    @staticmethod
    def join(parts: Sequence[ModelRewards]) -> ModelRewards:
        """The samples of several parts, all judged by the same models."""
        outcomes = [part.outcomes for part in parts if part.outcomes is not None]
        return ModelRewards(
            torch.cat([part.scores for part in parts]),
            torch.cat(outcomes) if outcomes else None,
            [steps for part in parts for steps in part.steps],
        )


def merge_steps(*given: StepRewards) -> StepRewards:
    """Step rewards of several judges in the order of their places; those of one place are added."""
    total: dict[int, float] = {}
    for place, reward in (step for steps in given for step in steps):
        total[place] = total.get(place, 0.0) + reward
    return tuple(sorted(total.items()))


@dataclass(frozen=True)
class Scores:
    """What the models say about a rollout, one tensor per micro-batch in the batch's layout [rows, tokens]."""

    log_probs: list[Tensor] | None = None
    reference_log_probs: list[Tensor] | None = None
    values: list[Tensor] | None = None


class Workers(Protocol):
    """The policy and the models around it."""

    async def score(self, batches: Sequence[Batch], *, log_probs: bool) -> Scores:
        """Reference log-probs and values where those models exist; the policy's own where asked for."""
        ...

    async def log_probs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The policy's alone, one tensor per micro-batch [rows, tokens]."""
        ...

    async def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards | None:
        """What the reward models give, summed; None without a reward model."""
        ...

    async def train(
        self, micro_batches: Sequence[Batch], *, kl_coef: float, progress: float, train_policy: bool
    ) -> Metrics:
        """One optimizer step of the policy (unless it is held still) and of the critic, where there is one.

        `progress` is the part of the run that lies behind, in [0, 1): learning rates follow it.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Everything that resuming needs, into a folder that is there and empty."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """The policy for plain Transformers, into a folder that is there and empty."""
        ...

    async def export_critic(self, folder: Path) -> None: ...


class WeightSync(Protocol):
    """Trainer to engines. Both sides enter it together."""

    async def sync(self, version: int) -> None:
        """Engines draw with the policy's weights from now on; where they share devices with it, they take them over."""
        ...

    async def begin_training(self) -> None:
        """Nothing is generated until the next sync, so engines that share devices with the models give them up."""
        ...

    async def end_training(self, version: int) -> None:
        """Engines that gave their devices up (to save, say) take them over again; the others noticed nothing."""
        ...
