"""Expert parallelism: each process holds some of the experts, and tokens are sent to their experts and back.

The processes of an expert group hold all experts of every layer together, in equal parts. Each process has different
tokens. In the forward pass of a layer's experts, every token is sent to the processes that hold its experts, computed
there, and sent back, each time with one all-to-all; the backward pass sends the gradients the same way. Processes at
the same position of all groups hold the same experts, and FSDP shards those over them. For example, six processes with
--expert_parallel_size 2 and a model with eight experts:

    expert groups   (0 1) (2 3) (4 5)
    experts 0-3     sharded over processes 0, 2 and 4
    experts 4-7     sharded over processes 1, 3 and 5

The experts themselves are computed by the model's own class, with the implementation that Transformers chose, such as
grouped matrix products. (Transformers' own plan for expert parallelism sends all tokens to all processes.)
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from openrlhf.errors import ConfigError
from openrlhf.models.chunks import AutogradContext
from openrlhf.models.experts import expert_modules, number_of_experts
from openrlhf.models.forward import Network


def check_experts(config: PretrainedConfig, name: str, size: int) -> None:
    """Reject --expert_parallel_size for a model whose experts it does not divide; a model may have none."""
    experts = number_of_experts(config)
    if experts % size:
        raise ConfigError(
            f"--expert_parallel_size {size} does not divide the {experts} experts of {name}",
            try_this=f"--expert_parallel_size {math.gcd(experts, size)}",
        )


def modules_to_divide(network: Network, size: int) -> list[nn.Module]:
    """Return the modules that hold the experts of a network; none if it has no experts."""
    check_experts(network.decoder.config, type(network.decoder).__name__, size)
    found = expert_modules(network)
    if number_of_experts(network.decoder.config) and not found:
        raise ConfigError(
            f"--expert_parallel_size {size} cannot divide the experts of {type(network.decoder).__name__}, which"
            " are separate modules",
            try_this="--expert_parallel_size 1",
        )
    for module in found:
        if len(inspect.signature(type(module).forward).parameters) != 4:  # self, states, chosen experts, their weights
            raise ConfigError(
                f"--expert_parallel_size {size} cannot divide the experts of {type(network.decoder).__name__}: "
                f"{type(module).__name__} does not take the experts of each token",
                try_this="--expert_parallel_size 1",
            )
    return found


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this process's part of the experts that a module holds."""
    group = mesh.get_group("experts")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    experts: Any = module
    experts.num_experts //= size
    for parameter in experts.parameters():
        parameter.data = parameter.data.chunk(size)[rank].clone()  # so that the memory of the others is freed
    experts.forward = ExpertExchange(experts, group)


def exchange_of(module: nn.Module) -> ExpertExchange | None:
    """Return the exchange of a module whose experts are split across processes; None for other modules."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, ExpertExchange) else None


@dataclass(frozen=True)
class ExpertExchange:
    """The forward pass of experts that are split across a group of processes."""

    experts: Any  # the module of a Transformers model that holds this process's experts
    group: dist.ProcessGroup

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [tokens, hidden].

        `top_k_index` and `top_k_weights` are [tokens, k]; experts are numbered as in the whole model.
        """
        tokens, k = top_k_index.shape
        size, held = dist.get_world_size(self.group), self.experts.num_experts
        chosen = top_k_index.flatten()  # [tokens x k]
        order = chosen.argsort(stable=True)  # by expert, and therefore by process
        sent = torch.bincount(chosen, minlength=size * held)  # tokens of this process for each expert
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)  # tokens of each process for the experts held here
        sizes = torch.stack([sent.view(size, held).sum(1), received.view(size, held).sum(1)]).tolist()

        arrived = AllToAll.apply(hidden_states[order // k], sizes[1], sizes[0], self.group)  # [received, hidden]
        numbers = torch.arange(held, device=sent.device).repeat(size).repeat_interleave(received)  # [received]
        computed = self._compute(arrived, numbers)
        returned = AllToAll.apply(computed, sizes[0], sizes[1], self.group)  # [tokens x k, hidden], in `order`

        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = returned[places].view(tokens, k, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)

    def _compute(self, hidden: Tensor, numbers: Tensor) -> Tensor:
        """Apply one expert of this process to each row of [received, hidden], with the model's own code."""
        if len(hidden):
            alone = numbers[:, None]
            return type(self.experts).forward(self.experts, hidden, alone, torch.ones_like(alone, dtype=hidden.dtype))
        # Use every matrix, so that its gradient is zero, not missing: FSDP reduces it together with other processes.
        return hidden + sum(parameter.sum() * 0.0 for parameter in self.experts.parameters())


class AllToAll(torch.autograd.Function):
    """Send rows to the processes of a group, in order of rank; gradients travel back."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Send `sent[r]` rows to each rank r, and return the rows from all ranks, `received[r]` from each."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None


def gather_experts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the matrices of all experts from the processes of an expert group."""
    whole = tensor.new_empty(len(tensor) * dist.get_world_size(group), *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole
