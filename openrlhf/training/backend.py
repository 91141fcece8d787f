"""The seam between what is trained and how: a small Protocol that one process and DeepSpeed both fulfil."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.algo.reduce import Metrics
from openrlhf.models.chunks import Head
from openrlhf.models.forward import Ask, Network, Outputs
from openrlhf.types import TEMPERATURE_FACTORS, Batch


class Run(Protocol):
    """A network, or an engine around one: what an objective calls to get outputs with gradients."""

    def __call__(
        self,
        batch: Batch,
        ask: Ask,
        *,
        temperature: float | Tensor = 1.0,
        teacher_hidden: Tensor | None = None,
        teacher_head: Head | None = None,
    ) -> Outputs: ...


class Objective(Protocol):
    """What one optimizer step minimises.

    `counts` are this micro-batch's share of the denominators (tokens, pairs); the backend adds them over all
    micro-batches and ranks of the step and hands the totals to `loss`, whose values then add up to the step's loss.
    """

    def counts(self, batch: Batch) -> Tensor: ...  # [kinds] float64

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True)
class StepLosses:
    """What a forward and backward pass over one step's micro-batches gave, before the optimizer moves."""

    losses: Tensor  # [micro-batches]: shares of the step's loss, on this rank
    metrics: Metrics  # sums over all ranks


class Frozen(Protocol):
    """A model that only looks: a reference or a teacher."""

    def forward(self, batch: Batch, ask: Ask, *, temperature: float | Tensor = 1.0) -> Outputs:
        """Outputs without gradients."""
        ...

    @property
    def head(self) -> Head:
        """The projection to the vocabulary, usable wherever the backend keeps its weight."""
        ...

    def most_rounds(self, count: int) -> int:
        """How many forwards this process must run when it has `count` of its own: sharded models run together."""
        ...


class TrainBackend(Frozen, Protocol):
    """Owns a network, its optimizer, and how both are spread over devices.

    One `forward_backward` takes all micro-batches of an optimizer step; a rank whose share is empty still takes part
    with micro-batches of weight zero, because a sharded model waits for everyone.
    """

    @property
    def network(self) -> Network: ...

    @property
    def rank(self) -> int:
        """Number of this process among the data-parallel ranks."""
        ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def process(self) -> int:
        """Number of this process among all, peers and rings included; 0 is the one that writes files."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward_backward(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLosses: ...

    def evaluate(self, micro_batches: Sequence[Batch], objective: Objective) -> Metrics:
        """The objective's metrics without gradients, summed over ranks."""
        ...

    def optim_step(self, scale: float) -> float | None:
        """Moves the weights with `scale` times the peak learning rates; returns the gradient norm before clipping.

        None says that the step was skipped because scaled gradients overflowed fp16.
        """
        ...

    def loss_scaling(self) -> dict[str, float]:
        """`loss_scale` and `skipped_steps` of an fp16 run, for the logs; empty if the loss is not scaled."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine loads: whole tensors of the plain model by checkpoint name, adapters merged, on every rank.

        Every rank goes through all of them. A tensor holds until the next one is asked for.
        """
        ...

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """What `export` writes (of adapters, themselves alone) under its names in memory; as with `weights`."""
        ...

    def save(self, folder: Path) -> None:
        """Everything that resuming needs: weights, optimizer."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A folder that plain Transformers loads (adapters: that PEFT loads)."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor: ...

    def anyone(self, wished: bool) -> bool:
        """True in all processes when it is in any of them."""
        ...

    def barrier(self) -> None: ...

    def sleep(self) -> None:
        """Gives the device's memory back until `wake`."""
        ...

    def wake(self) -> None: ...


def with_extras(batch: Batch, **extras: Tensor) -> Batch:
    """The batch with more tensors beside it, such as a reference's log-probs."""
    return replace(batch, extras={**batch.extras, **extras})


def temperature_of(batch: Batch, own: float) -> float | Tensor:
    """The run's `own` temperature, or [rows, tokens] if turns of some sequence were drawn at others."""
    factors = batch.extras.get(TEMPERATURE_FACTORS)
    return own if factors is None else own * factors


def is_weightless(batch: Batch) -> bool:
    """True for the filler of a rank that has fewer micro-batches than the others."""
    return "weightless" in batch.extras


def values_of(metrics: Metrics) -> dict[str, float]:
    """The means to log; a name that begins with an underscore is a statistic for someone else."""
    return {name: float(mean.value) for name, mean in metrics.items() if not name.startswith("_")}


def flatten(metrics: Metrics) -> tuple[list[str], Tensor]:
    """Metrics as one tensor, so that one collective adds them all; keys in sorted order, the same on each rank."""
    names = sorted(metrics)
    rows = [torch.stack([metrics[name].total, metrics[name].count]) for name in names]
    return names, torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)
