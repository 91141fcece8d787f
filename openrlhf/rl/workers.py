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

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Tensor | None:
        """[samples] from the reward models, weighted and summed; None where there is no reward model."""
        ...

    async def train(self, micro_batches: Sequence[Batch], *, kl_coef: float, train_policy: bool) -> Metrics:
        """One optimizer step of the policy (unless it is held still) and of the critic, where there is one."""
        ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


class WeightSync(Protocol):
    """Trainer to engine. Both sides enter it together."""

    async def sync(self, version: int) -> None: ...
