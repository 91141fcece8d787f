"""What the loop asks of the models: small verbs that one process and a cluster both fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from openrlhf.types import Batch, Trajectory

Metrics = dict[str, float]


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

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Tensor | None:
        """[samples] from the reward models, weighted and summed; None where there is no reward model."""
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
