"""The interface between objectives (what to train) and backends (how to train it).

Objectives say what an optimizer step minimises; a `TrainBackend` runs it. `LocalBackend` (one process) and
`DeepSpeedBackend` (many) implement the same protocol, so the supervised loop and the RL loop do not know which one
they use. A loop calls, for each step:

    forward_backward(micro_batches, objective)    gradients of the whole step, and its metrics
    optim_step(scale)                             clip, update, clear; `scale` comes from the learning-rate schedule

The functions at the end are small parts that both backends or both loops share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from openrlhf.algo.reduce import Metrics, Moments
from openrlhf.models.forward import Network, Teacher, Wanted
from openrlhf.types import Batch, RolloutBatch

COMPILER = "inductor"  # backend of torch.compile; tests use one that traces the same graphs but generates no C++

B = TypeVar("B", bound=Batch)
BatchKind = TypeVar("BatchKind", bound=Batch, contravariant=True)


class Run(Protocol):
    """The callable an objective uses to get outputs with gradients: a network, or an engine around one."""

    def __call__(
        self, batch: Batch, wanted: type[Wanted], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
    ) -> Wanted: ...


class Objective(Protocol[BatchKind]):
    """The quantity that one optimizer step minimises, computed from one kind of batches.

    `counts` returns this micro-batch's share of the denominators (tokens, pairs). The backend sums the counts over all
    micro-batches and ranks of the step and passes the totals to `loss`, whose values then add up to the step's loss.
    The result therefore does not depend on how a step is split into micro-batches.
    """

    def counts(self, batch: BatchKind) -> Tensor: ...  # [kinds] float64

    def loss(self, run: Run, batch: BatchKind, totals: Tensor) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True)
class StepLosses:
    """Results of the forward and backward passes over one step's micro-batches, before the optimizer step."""

    losses: Tensor  # [micro-batches]: this rank's shares of the step's loss
    metrics: Metrics  # sums over all ranks


class Frozen(Protocol):
    """A model that is not trained: a reference, a teacher or a reward model."""

    network: Network

    def forward(self, batch: Batch, wanted: type[Wanted], *, temperature: float | Tensor = 1.0) -> Wanted:
        """Compute outputs without gradients."""
        ...

    def most_rounds(self, count: int) -> int:
        """Return how many forward passes this process must run if it needs `count` itself.

        A sharded model runs on all ranks together, so every rank runs as many as the rank that needs the most.
        """
        ...


class TrainBackend(Frozen, Protocol):
    """Owner of a network, its optimizer, and their placement on devices.

    One `forward_backward` call takes all micro-batches of an optimizer step. A rank with no rows of its own still takes
    part, with fillers, because a sharded model runs on all ranks together.
    """

    rank: int  # data-parallel rank of this process
    data_parallel_size: int
    process: int  # global rank, counting tensor-parallel peers and ring members too; process 0 writes the files

    @property
    def device(self) -> torch.device: ...

    def forward_backward(self, micro_batches: Sequence[B], objective: Objective[B]) -> StepLosses: ...

    def evaluate(self, micro_batches: Sequence[B], objective: Objective[B]) -> Metrics:
        """Compute the objective's metrics without gradients, summed over ranks."""
        ...

    def optim_step(self, scale: float) -> float | None:
        """Update the weights with `scale` times the peak learning rates; return the gradient norm before clipping.

        None means that the step was skipped because scaled gradients overflowed fp16.
        """
        ...

    def loss_scaling(self) -> dict[str, float]:
        """Return `loss_scale` and `skipped_steps` of an fp16 run for the logs; empty if the loss is not scaled."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a rollout engine loads: full tensors by checkpoint name, with adapters merged, on every rank.

        Collective: every rank must iterate to the end. A tensor is valid only until the next one is requested.
        """
        ...

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `export` writes, under their in-memory names; of a LoRA model only the adapters.

        Collective, like `weights`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what resuming needs: weights and optimizer state."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write a model folder that Transformers can load, or for adapters, one that PEFT can load."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks, on the device of `values`."""
        ...

    def any_process(self, condition: bool) -> bool:
        """Return True in all processes if `condition` holds in any of them."""
        ...

    def barrier(self) -> None: ...

    def sleep(self) -> None:
        """Free the device memory until `wake` is called."""
        ...

    def wake(self) -> None: ...


def temperature_of(batch: RolloutBatch, own: float) -> float | Tensor:
    """Return the run's `own` temperature, or one per token [rows, tokens] if some turns were sampled at another."""
    return own if batch.temperature_factors is None else own * batch.temperature_factors


def values_of(metrics: Metrics) -> dict[str, float]:
    """Return the means to log; moments are left out, because only an evaluation makes use of them."""
    return {name: float(mean.value) for name, mean in metrics.items() if not isinstance(mean, Moments)}


def compile_decoder_layers(network: Network) -> None:
    """Apply --deepcompile: compile each decoder layer. They do nearly all of the work and share one compiled graph."""
    for module in network.decoder.base_model.children():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=True, backend=COMPILER)
