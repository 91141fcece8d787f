"""Interfaces between objectives, training backends and training loops.

An objective defines the loss of an optimizer step, and a `TrainBackend` runs the step: `LocalBackend` in one process,
`DeepSpeedBackend` or `FsdpBackend` in several. Both loops, supervised and RL, work with any. For each step, they call:

    forward_backward(micro_batches, objective)    gradients of the whole step, and its metrics
    optim_step(scale)                             clip, update, clear; `scale` is the learning rate factor

The functions at the end are shared by the backends or the loops.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from openrlhf.algo.reduce import Metrics, Moments, add_metrics, sequence_count
from openrlhf.errors import BackendError
from openrlhf.models.export import save_model, saved_tensors
from openrlhf.models.forward import HiddenStates, Network, Requested, Teacher
from openrlhf.models.plain import checkpoint_weights
from openrlhf.monitor import Progress
from openrlhf.training.atomic_folder import Ranks
from openrlhf.training.fsdp_checkpoint import Block
from openrlhf.training.host_memory import HostMemory, OffloadedWeights
from openrlhf.training.utilization import UtilizationMeter
from openrlhf.types import Batch, RolloutBatch

LEAST_LOSS = 0.1  # smaller losses are not checked, because dropout may change them by that much
SLACK = 1.5  # factor by which a share of the loss may differ from the expected one

B = TypeVar("B", bound=Batch)
BatchKind = TypeVar("BatchKind", bound=Batch, contravariant=True)


class Run(Protocol):
    """The callable that an objective uses to get outputs with gradients: a network, or a DeepSpeed engine."""

    def __call__(
        self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
    ) -> Requested: ...


@dataclass(frozen=True)
class StepTotals:
    """Counts over all micro-batches and ranks of an optimizer step, used as denominators of its loss."""

    targets: Tensor  # target tokens; [] float64, like the other fields
    trained_sequences: Tensor  # sequences with at least one target
    sequences: Tensor
    tokens: Tensor
    micro_batches: Tensor
    expert_counts: Tensor | None = None  # [experts], see `Outputs`; None if a micro-batch's own counts suffice

    @property
    def sizes(self) -> tuple[Tensor, ...]:
        """The totals that a loss may be divided by."""
        return self.targets, self.trained_sequences, self.sequences, self.tokens, self.micro_batches


def counts(batch: Batch) -> Tensor:
    """Return the contribution of a micro-batch to the sizes of `StepTotals`, [5] float64; zeros for a filler."""
    trained = sequence_count(batch.target_mask, batch.sequence_ids)
    found = (float(batch.target_mask.sum()), float(trained), batch.num_sequences, float(batch.lengths.sum()), 1.0)
    return torch.tensor(found, dtype=torch.float64) * (not batch.filler)


class Objective(Protocol[BatchKind]):
    """The loss that an optimizer step minimises, for one kind of batch.

    The loss of each micro-batch is divided by totals of the whole step, so that the losses add up to that of the step,
    however it is split into micro-batches.
    """

    def loss(self, run: Run, batch: BatchKind, totals: StepTotals) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True)
class StepLosses:
    """Results of the forward and backward passes over the micro-batches of a step."""

    losses: Tensor  # [micro-batches]: contributions of this rank to the step's loss
    metrics: Metrics  # sums over all ranks


@dataclass(frozen=True)
class WeightPart:
    """The part of an exported tensor that this process holds."""

    name: str
    values: Tensor
    block: Block  # position in the exported tensor


class Frozen:
    """A model that is not trained: a reference, a teacher or a reward model."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self.network = network
        self.device = device
        self.run: Run = network  # or a module that shards it
        self.offloaded: OffloadedWeights | None = None  # set if the weights stay in host memory between uses

    def offload(self) -> None:
        """Keep the decoder in host memory, except in `on_device`; for models that are not trained.

        The head stays on the device, because distillation applies it outside a forward pass.
        """
        decoder, head = self.network.decoder_without_head, self.network.decoder.get_output_embeddings()
        stays = set() if head is None else {id(tensor) for tensor in (*head.parameters(), *head.buffers())}
        tensors = (*decoder.parameters(), *decoder.buffers())
        self.offloaded = OffloadedWeights([item for item in tensors if id(item) not in stays], self.device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep offloaded weights on the device, so that several forward passes move them only once."""
        if self.offloaded is None or self.offloaded.loaded:
            yield
            return
        self.offloaded.load()
        try:
            yield
        finally:
            self.offloaded.release()

    @torch.no_grad()
    def forward(self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0) -> Requested:
        """Compute outputs without gradients."""
        with self.on_device():
            return self.run(batch.to(self.device), kind, temperature=temperature)

    def most_rounds(self, count: int) -> int:
        """Return the number of forward passes that this process must run if it needs `count` of them.

        A sharded model runs on all ranks together, so all ranks run the maximum over the ranks.
        """
        return count


class TrainBackend(Frozen, Ranks, ABC):
    """A network and its optimizer, placed on devices.

    `forward_backward` takes all micro-batches of an optimizer step. A rank without rows takes part with fillers,
    because a sharded model runs on all ranks together. The methods implemented here are for a single process, in which
    collective operations are trivial.
    """

    rank = 0  # data-parallel rank of this process
    data_parallel_size = 1
    unchecked_steps = 3  # steps that `_check_share` still has to check
    steps_left = 0  # optimizer steps after the current one; set by the training loop
    has_signal = True  # set to False before an optimizer step whose gradients are zero by design; see `Audit`
    # `process` is the global rank, which also counts tensor-parallel peers and ring members; process 0 writes files.

    def __init__(self, network: Network, device: torch.device) -> None:
        super().__init__(network, device)
        self.module: nn.Module = network  # or a module that shards it; in training mode between calls
        self.host = HostMemory()  # stores the tensors while the backend sleeps
        self.meter = UtilizationMeter(network, device)

    @torch.no_grad()
    def forward(self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0) -> Requested:
        self.module.eval()
        outputs = self.run(batch.to(self.device), kind, temperature=temperature)
        self.module.train()
        return outputs

    def forward_backward(self, micro_batches: Sequence[B], objective: Objective[B]) -> StepLosses:
        """Accumulate the gradients of a whole optimizer step."""
        self.meter.begin(micro_batches)
        on_device = [batch.to(self.device) for batch in micro_batches]
        totals = self._totals(micro_batches, on_device)
        losses: list[Tensor] = []
        metrics: list[Metrics] = []
        hidden = self.device.type != "cpu" or len(on_device) == 1  # on a GPU, the loop only launches kernels
        with Progress("update", total=len(on_device), unit="micro-batch", hidden=hidden, brief=True) as progress:
            for batch in on_device:
                loss, measured = objective.loss(self.run, batch, totals)  # contribution of this micro-batch
                if batch.filler:
                    loss = loss * 0.0
                else:
                    metrics.append(measured)
                self.backward(loss)
                losses.append(loss.detach())
                progress.advance()
        if self.unchecked_steps and len(on_device) > 1:
            self.unchecked_steps -= 1
            self._check_share(float(losses[0]), on_device[0], objective, totals)
        return StepLosses(torch.stack(losses), self.sum_metrics(add_metrics(metrics)))  # [micro-batches]

    def _totals(self, micro_batches: Sequence[Batch], on_device: Sequence[Batch]) -> StepTotals:
        """Count over these micro-batches and all ranks; most counts are taken on the CPU, without waiting."""
        sizes = self.sum_over_ranks(torch.stack([counts(batch) for batch in micro_batches]).sum(0))
        return StepTotals(*sizes, expert_counts=self._count_experts(on_device))

    def _count_experts(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        """Return the number of tokens that each expert gets in a step, if the load-balancing loss needs it in advance.

        This takes a forward pass over each micro-batch: the gradient of one depends on the choices in all others.
        """
        is_whole = len(micro_batches) == 1 and self.data_parallel_size == 1
        if is_whole or not self.network.with_aux_loss:
            return None
        found: list[Tensor] = []
        for batch in micro_batches:
            loads = self.forward(batch, HiddenStates).expert_counts
            assert loads is not None
            found.append(loads * (not batch.filler))
        return self.sum_over_ranks(torch.stack(found).sum(0))

    @torch.no_grad()
    def _check_share(self, share: float, batch: B, objective: Objective[B], totals: StepTotals) -> None:
        """Raise if a micro-batch's share of the step's loss does not match its size, as if the loss averaged over it.

        The expected share is the micro-batch's fraction of the step, times the loss of a step with this micro-batch
        alone. All ranks run this forward pass, because a sharded model needs them all.
        """
        own = totals if batch.filler else StepTotals(*counts(batch))
        self.module.eval()
        alone = float(objective.loss(self.run, batch, own)[0])
        self.module.train()
        if batch.filler or not (math.isfinite(share) and math.isfinite(alone)) or abs(alone) < LEAST_LOSS:
            return
        # The micro-batch's fractions of the step's totals; an objective divides by one of these.
        parts = [float(mine / whole) for mine, whole in zip(own.sizes, totals.sizes, strict=True) if whole > 0]
        if not min(parts) / SLACK < share / alone < max(parts) * SLACK:
            raise BackendError(
                f"the first of {totals.micro_batches:g} micro-batches has a wrong share of the step's loss: expected "
                f"{min(parts):.2g} to {max(parts):.2g} times its own loss, got {share / alone:.2g} times; "
                "gradients would depend on the number of micro-batches",
                try_this="a loss that divides by the totals of the step (StepTotals), not of the micro-batch",
            )

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[B], objective: Objective[B]) -> Metrics:
        """Compute the objective's metrics of these micro-batches, as for a step, without gradients; sum over ranks."""
        on_device = [batch.to(self.device) for batch in micro_batches]
        totals = self._totals(micro_batches, on_device)
        self.module.eval()
        metrics: list[Metrics] = []
        for batch in on_device:
            measured = objective.loss(self.run, batch, totals)[1]
            metrics += [] if batch.filler else [measured]
        self.module.train()
        return self.sum_metrics(add_metrics(metrics))

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch to those of the step."""

    @abstractmethod
    def optim_step(self, scale: float) -> float | None:
        """Update the weights with `scale` times the peak learning rates; return the gradient norm before clipping.

        None means that the step was skipped because fp16 gradients overflowed.
        """

    @abstractmethod
    def loss_scaling(self) -> dict[str, float]:
        """Return `loss_scale` and `skipped_steps` of an fp16 run for the logs; empty if the loss is not scaled."""

    def utilization(self) -> dict[str, float]:
        """Return `mfu` of the step that `optim_step` has just ended, for the logs; empty if the peak is not known."""
        return self.meter.read(self.num_processes // self.data_parallel_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) for a rollout engine, with adapters merged, on every rank.

        Collective: every rank must iterate to the end. A tensor is valid only until the next one is requested.
        """
        return checkpoint_weights(self.network)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `export` writes, under their in-memory names; for a LoRA model, only the adapters.

        Collective, like `weights`.
        """
        return saved_tensors(self.network)

    def parts(self) -> Iterator[WeightPart]:
        """Yield the exported tensors, or the shards of them, of which this process keeps a moving average.

        Without shards, process 0 has all of them. Collective, like `weights`.
        """
        for name, tensor in self.exported():
            if self.process == 0:
                yield WeightPart(name, tensor, Block.whole(tensor.shape))

    @property
    def num_part_holders(self) -> int:
        """How many processes, counted from the first, have `parts`."""
        return 1

    def joined(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors in the network's precision, given values for the `parts`. Collective, like `weights`."""
        for name, tensor in parts.items():
            yield name, tensor.to(self.network.dtype)

    def checkpoint_bytes(self) -> int:
        """Estimate the size of a checkpoint, all ranks together: fp32 weights and two moments per trained parameter."""
        trained = (parameter for parameter in self.network.parameters() if parameter.requires_grad)
        return 12 * sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the weights and optimizer state needed to resume."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""

    def steps_taken(self) -> int | None:
        """Return the number of optimizer steps so far, as counted by the optimizer; None if it does not count."""
        return None

    def export(self, folder: Path, tensors: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Write a model folder for Transformers or, for adapters, for PEFT; `tensors` replace the current weights."""
        save_model(self.network, folder, None if tensors is None else dict(tensors))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks; the result is on the device of `values`."""
        return values

    def sum_metrics(self, metrics: Metrics) -> Metrics:
        """Sum over data-parallel ranks, which may have different metrics."""
        return metrics

    def any_process(self, condition: bool) -> bool:
        """Return True in all processes if `condition` holds in any of them."""
        return condition

    @abstractmethod
    def sleep(self) -> None:
        """Free the device memory until `wake` is called."""

    def wake(self) -> None:
        """Undo `sleep`."""
        self.host.give_back()


def temperature_of(batch: RolloutBatch, own: float) -> float | Tensor:
    """Return the run's temperature `own`, or temperatures per token [rows, tokens] if some turns used another one."""
    return own if batch.temperature_factors is None else own * batch.temperature_factors


def values_of(metrics: Metrics) -> dict[str, float]:
    """Return the means to log; moments are omitted, because only evaluation uses them."""
    return {name: float(mean.value) for name, mean in metrics.items() if not isinstance(mean, Moments)}
