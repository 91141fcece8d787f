"""Training in one process, on the CPU or one GPU, with PyTorch alone.

`LocalBackend` combines a network with a `MasterOptimizer`, which keeps fp32 weights, and for fp16 with a `LossScale`.
`CompilingBackend` compiles its layers during the run. `DeepSpeedBackend` and `FsdpBackend` compute the same results in
several processes; the latter shares `MasterBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.algo.reduce import Metrics
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import BackendError, counted, first_line
from openrlhf.models.forward import Network, Requested
from openrlhf.models.self_test import choose_layout
from openrlhf.training.audit import Audit
from openrlhf.training.backend import B, Frozen, Objective, StepLosses, TrainBackend
from openrlhf.training.compilation import AutomaticCompilation, compile_network
from openrlhf.training.optim import LossScale, MasterOptimizer
from openrlhf.types import Batch

Result = TypeVar("Result")

OPTIMIZER_FILE = "optimizer.safetensors"
LOSS_SCALE = "loss_scale"  # key of the loss scale's tensor in that file


class LocalFrozen(Frozen):
    """A model that is not trained; with `offload`, its weights stay in host memory between uses."""

    def __init__(self, network: Network, device: torch.device, *, offload: bool = False) -> None:
        super().__init__(network.eval().requires_grad_(False).to(device), device)
        choose_layout(network, self.forward)
        if offload:
            self.offload()


class MasterBackend(TrainBackend):
    """Base of the backends with a `MasterOptimizer` and, in fp16, a `LossScale`; subclasses place the network."""

    optimizer: MasterOptimizer
    loss_scale: LossScale | None
    audit: Audit

    def backward(self, loss: Tensor) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()

    def optim_step(self, scale: float) -> float | None:
        self.audit.begin(scale * self.optimizer.learning_rate, has_signal=self.has_signal)
        norm = self.optimizer.step(scale, self.loss_scale.value if self.loss_scale else None)
        if self.loss_scale:
            self.loss_scale.update(overflowed=norm is None)
        self.audit.end(moved=norm is not None)
        return norm

    def loss_scaling(self) -> dict[str, float]:
        scale = self.loss_scale
        return {"loss_scale": scale.value, "skipped_steps": float(scale.skipped)} if scale else {}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: masters, optimizer states and the loss scale."""
        tensors = {name: tensor.contiguous() for name, tensor in self.optimizer.state().items()}
        if self.loss_scale:
            tensors[LOSS_SCALE] = torch.tensor(astuple(self.loss_scale), dtype=torch.float64)
        return tensors

    def restore(self, folder: Path, read: Callable[[], dict[str, Tensor]]) -> None:
        """Restore the tensors that `read` returns from a checkpoint."""
        try:
            tensors = read()
            scale = tensors.pop(LOSS_SCALE, None)
            self.optimizer.load_state(tensors)
            lost = tensors.keys() - self.optimizer.state().keys()
            if lost:
                raise BackendError(
                    f"the optimizer has no counterpart for {counted(len(lost), 'saved tensor')}, such as {min(lost)}"
                )
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise BackendError(
                f"the checkpoint {folder} does not fit this model: {first_line(error)}",
                try_this="the model and flags of the run that wrote it, or start over without --load_checkpoint",
            ) from None
        if self.loss_scale and scale is not None:
            value, applied, skipped = scale.tolist()
            self.loss_scale = LossScale(value, int(applied), int(skipped))

    def steps_taken(self) -> int | None:
        states = [slots for optimizer in self.optimizer.optimizers for slots in optimizer.state.values()]
        counted = [int(slots["step"]) for slots in states if "step" in slots]
        if states and not counted:  # Muon alone, which counts no steps: all parameters are matrices, as in adapters
            return None
        taken = max(counted, default=0)
        return taken + (self.loss_scale.skipped if self.loss_scale else 0)

    def optimizer_states(self) -> list[Tensor]:
        """Return the states of all masters, such as Adam's moments."""
        states = [slots for optimizer in self.optimizer.optimizers for slots in optimizer.state.values()]
        return [value for slots in states for value in slots.values()]


class LocalBackend(MasterBackend):
    """Train a network in one process, on one device."""

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
        super().__init__(network.to(device), device)
        choose_layout(network, self.forward)
        network.train()
        self.optimizer = MasterOptimizer(network, optimizer, learning_rate, offload=adam_offload)
        half = any(parameter.dtype == torch.float16 for parameter in network.parameters())
        self.loss_scale = LossScale() if half else None
        masters = {id(parameter): self.optimizer.masters[name] for name, parameter in self.optimizer.named}
        self.audit = Audit(self.optimizer.named, lambda parameter: masters[id(parameter)], lambda found: found)
        if compile_layers:
            compile_network(network)

    def save(self, folder: Path) -> None:
        save_file(self.state(), folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        self.restore(folder, lambda: load_file(folder / OPTIMIZER_FILE))

    def sleep(self) -> None:
        # Move all tensors that exist between steps; the optimizer step has already freed the gradients.
        masters = self.optimizer.masters.values()
        self.host.take([*self.network.parameters(), *self.network.buffers(), *masters, *self.optimizer_states()])


class CompilingBackend(LocalBackend):
    """A local backend that compiles its layers if enough steps remain to pay for it (`AutomaticCompilation`)."""

    @cached_property
    def compilation(self) -> AutomaticCompilation:
        return AutomaticCompilation(self.network)

    def forward_backward(self, micro_batches: Sequence[B], objective: Objective[B]) -> StepLosses:
        self.compilation.begin(sum(batch.input_ids.numel() for batch in micro_batches))
        return self._without_compiler_errors(partial(super().forward_backward, micro_batches, objective))

    def forward(self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0) -> Requested:
        return self._without_compiler_errors(partial(super().forward, batch, kind, temperature=temperature))

    def evaluate(self, micro_batches: Sequence[B], objective: Objective[B]) -> Metrics:
        return self._without_compiler_errors(partial(super().evaluate, micro_batches, objective))

    def _without_compiler_errors(self, compute: Callable[[], Result]) -> Result:
        """Compute; if that fails in compiled layers, compute again without the compiler."""
        try:
            return compute()
        except Exception as error:
            if not self.compilation.survives(error):
                raise
        self.module.train()  # the mode between calls, which the error may have changed
        self.optimizer.drop_gradients()  # the gradients of earlier micro-batches
        return compute()

    def optim_step(self, scale: float) -> float | None:
        norm = super().optim_step(scale)
        self.compilation.end(self.steps_left)
        return norm
