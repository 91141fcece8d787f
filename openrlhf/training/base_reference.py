"""The reference of a LoRA run: the trained network itself, with its adapters switched off.

Adapters leave the base weights unchanged, so a run whose reference is --pretrain needs no second copy of it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from openrlhf.models.forward import Requested
from openrlhf.models.modes import without_adapters
from openrlhf.training.backend import Frozen, TrainBackend
from openrlhf.types import Batch


class BaseReference(Frozen):
    """The model below the adapters of a trained network, which takes no extra memory."""

    def __init__(self, backend: TrainBackend) -> None:
        super().__init__(backend.network, backend.device)
        self.backend = backend

    def forward(self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0) -> Requested:
        routed_itself = replace(batch, routed_experts=None)  # like a reference with separate weights
        with without_adapters(self.network.model):
            return self.backend.forward(routed_itself, kind, temperature=temperature)

    def most_rounds(self, count: int) -> int:
        return self.backend.most_rounds(count)
