"""The optimizer of sharded weights: each rank updates its own rows.

FSDP leaves the sum of all gradients of a step in the shards. `ShardOptimizer` is a `MasterOptimizer` whose masters are
these shards as plain tensors, so the arithmetic is that of the local backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch import nn

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.training.fsdp_shards import ExpertGroups, local_shard, num_copies
from openrlhf.training.optim import MasterOptimizer, Named, trainable

EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


class ShardOptimizer(MasterOptimizer):
    """Updates this rank's shards of a network; the norm for clipping is that of all shards together."""

    def __init__(
        self,
        network: nn.Module,
        flags: OptimizerFlags,
        learning_rate: float,
        *,
        device: torch.device,
        experts: ExpertGroups,
    ) -> None:
        self.device = device
        self.experts = experts
        self.sharded: list[Named] = trainable(network)
        super().__init__(network, flags, learning_rate)

    def parameters_of(self, network: nn.Module) -> list[Named]:
        return [(name, nn.Parameter(local_shard(parameter))) for name, parameter in self.sharded]

    def link(self) -> None:
        """Let the masters use the memory of the shards and of their gradients, which FSDP may have replaced."""
        for (_, parameter), (_, master) in zip(self.sharded, self.named, strict=True):
            master.data = local_shard(parameter)
            master.grad = None if parameter.grad is None else local_shard(parameter.grad)
            parameter.grad = None

    def clip(self, masters: Sequence[nn.Parameter]) -> float:
        pairs = zip(masters, self.sharded, strict=True)
        found = [
            (master.grad, num_copies(sharded, self.experts.get(id(sharded))))
            for master, (_, sharded) in pairs
            if master.grad is not None
        ]
        gradients = [gradient for gradient, _ in found]
        squares = torch.zeros((), dtype=torch.float32, device=self.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients)).to(self.device)
            copies = torch.tensor([count for _, count in found], device=self.device)
            squares += (norms.square() / copies).sum()  # each part of a gradient counts once
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        limit = self.flags.max_norm
        if gradients and limit and norm + EPSILON > limit:  # also false if the norm is NaN
            torch._foreach_mul_(gradients, limit / (norm + EPSILON))
        return norm
