"""Training in one process, on the CPU or one GPU: the `TrainBackend` and `Frozen` that need only PyTorch.

`LocalBackend` combines a network with a `MasterOptimizer`, which keeps fp32 weights, and for fp16 with a `LossScale`.
There are no other ranks, so everything that is collective in `backend.py` is trivial here. `DeepSpeedBackend` gives the
same numbers over several processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.algo.reduce import Metrics, add_metrics
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import BackendError
from openrlhf.models.export import save_model, saved_tensors
from openrlhf.models.forward import Network, Wanted
from openrlhf.models.plain import checkpoint_weights
from openrlhf.models.self_test import choose_layout
from openrlhf.training.audit import Audit
from openrlhf.training.backend import B, Objective, StepLosses, compile_decoder_layers
from openrlhf.training.host_memory import HostMemory
from openrlhf.training.optim import LossScale, MasterOptimizer
from openrlhf.types import Batch

OPTIMIZER_FILE = "optimizer.safetensors"
LOSS_SCALE = "loss_scale"  # key of its tensor in that file


class LocalFrozen:
    """A model that is not trained; with `offload`, its weights are in host memory between forward passes."""

    def __init__(self, network: Network, device: torch.device, *, offload: bool = False) -> None:
        self.network = network.eval().requires_grad_(False).to(device)
        self.device = device
        self.offload = False  # the self-test below runs several forward passes: keep the weights in place for it
        choose_layout(network, self.forward)
        if offload:
            self.offload = True
            self.network.to("cpu")

    @torch.no_grad()
    def forward(self, batch: Batch, wanted: type[Wanted], *, temperature: float | Tensor = 1.0) -> Wanted:
        if self.offload:
            self.network.to(self.device)
        outputs = self.network(batch.to(self.device), wanted, temperature=temperature)
        if self.offload:
            self.network.to("cpu")
        return outputs

    def most_rounds(self, count: int) -> int:
        return count


class LocalBackend:
    """One network, one optimizer, one device; the only process is data-parallel rank 0 of 1."""

    rank = 0
    process = 0
    data_parallel_size = 1

    def __init__(
        self,
        network: Network,
        optimizer: OptimizerFlags,
        device: torch.device,
        *,
        learning_rate: float,
        adam_offload: bool = False,
        compile_layers: bool = False,
    ) -> None:
        self.device = device
        self.host = HostMemory()  # where the tensors are while the backend sleeps
        self.network = network.to(device)
        choose_layout(network, self.forward)
        self.network.train()
        self.optimizer = MasterOptimizer(self.network, optimizer, learning_rate, offload=adam_offload)
        half = any(parameter.dtype == torch.float16 for parameter in network.parameters())
        self.loss_scale = LossScale() if half else None
        masters = {id(parameter): master for parameter, master in self.optimizer.pairs()}
        self.audit = Audit(self.optimizer.named, lambda parameter: masters[id(parameter)], lambda found: found)
        if compile_layers:
            compile_decoder_layers(self.network)

    @torch.no_grad()
    def forward(self, batch: Batch, wanted: type[Wanted], *, temperature: float | Tensor = 1.0) -> Wanted:
        self.network.eval()
        outputs = self.network(batch.to(self.device), wanted, temperature=temperature)
        self.network.train()
        return outputs

    def most_rounds(self, count: int) -> int:
        return count

    def forward_backward(self, micro_batches: Sequence[B], objective: Objective[B]) -> StepLosses:
        on_device = [batch.to(self.device) for batch in micro_batches]
        totals = torch.stack([objective.counts(batch) for batch in on_device]).sum(0)  # [kinds]
        losses: list[Tensor] = []
        metrics: list[Metrics] = []
        for batch in on_device:
            loss, measured = objective.loss(self.network, batch, totals)  # this micro-batch's share of the step's loss
            (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()
            losses.append(loss.detach())
            metrics.append(measured)
        return StepLosses(torch.stack(losses), add_metrics(metrics))  # [micro-batches]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[B], objective: Objective[B]) -> Metrics:
        self.network.eval()
        # An evaluation has no optimizer step, so each micro-batch is its own total; only the metrics are used.
        on_device = (batch.to(self.device) for batch in micro_batches)
        metrics = add_metrics(objective.loss(self.network, batch, objective.counts(batch))[1] for batch in on_device)
        self.network.train()
        return metrics

    def optim_step(self, scale: float) -> float | None:
        self.audit.begin(scale * self.optimizer.learning_rate)
        norm = self.optimizer.step(scale, self.loss_scale.value if self.loss_scale else None)
        if self.loss_scale:
            self.loss_scale.update(overflowed=norm is None)
        self.audit.end(moved=norm is not None)
        return norm

    def loss_scaling(self) -> dict[str, float]:
        return self.loss_scale.metrics() if self.loss_scale else {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(self.network)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        return saved_tensors(self.network)

    def save(self, folder: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.optimizer.state().items()}
        if self.loss_scale:
            tensors[LOSS_SCALE] = self.loss_scale.state()
        save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        try:
            tensors = load_file(folder / OPTIMIZER_FILE)
            scale = tensors.pop(LOSS_SCALE, None)
            self.optimizer.load_state(tensors)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise BackendError(
                f"the checkpoint {folder} does not fit this model: {str(error).splitlines()[0]}"
            ) from None
        if self.loss_scale and scale is not None:
            self.loss_scale.load_state(scale)

    def export(self, folder: Path) -> None:
        save_model(self.network, folder)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def any_process(self, condition: bool) -> bool:
        return condition

    def barrier(self) -> None:
        """Do nothing: there are no other processes."""

    def sleep(self) -> None:
        # All tensors that are on the device between two steps: gradients are freed by the optimizer step.
        masters = [master for _, master in self.optimizer.masters]
        states = [slots for optimizer in self.optimizer.optimizers for slots in optimizer.state.values()]
        values = [value for slots in states for value in slots.values()]
        self.host.take([*self.network.parameters(), *self.network.buffers(), *masters, *values])

    def wake(self) -> None:
        self.host.give_back()
