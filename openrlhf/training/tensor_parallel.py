"""Tensor parallelism under FSDP: adjacent processes divide the matrices of each layer, following the model's own plan.

Transformers has a plan for most families, such as `layers.*.self_attn.q_proj: colwise`. A column-wise matrix gives each
process some of the outputs (attention heads), and the row-wise matrix after it takes them as inputs and adds up the
results of all processes. `TensorParallel` applies the plan with PyTorch's parallel styles, one layer at a time, before
FSDP shards the resulting parts over the other processes, so a matrix is split across a grid. With 4 processes and
--ds_tensor_parallel_size 2:

    matrix rows     [ upper half       ] [ lower half       ]      ranks 0 1 | 2 3    tensor-parallel peers
    FSDP            [ rank 0 ][ rank 2 ] [ rank 1 ][ rank 3 ]

Embeddings, norms and heads are computed by all peers. Models that are not trained are not split.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig

from openrlhf.errors import BackendError, ConfigError
from openrlhf.models.forward import Network
from openrlhf.training.process_grid import process_grid

COLUMNS = {  # styles by their names in a plan
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
}
ROWS = {
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
}
STYLES: dict[str, ParallelStyle] = {**COLUMNS, **ROWS}
WHOLE = "replicated_with_grad_allreduce"  # a norm of single heads, whose gradient is the sum over all heads
IN_A_LAYER = re.compile(r"(^|\.)layers\.")
FLAG = "--ds_tensor_parallel_size"
CHECKED_STEPS = 3  # first steps, in which peers compare gradients; those of one step alone may be zero
ROUNDING = 0.02  # relative difference of gradient norms up to which peers agree
NEGLIGIBLE = 1e-6  # gradient norms below this share of the largest one are not compared


def check_plan(config: PretrainedConfig, name: str, size: int) -> None:
    """Reject a model that has no plan, whose plan has styles of other kinds, or whose heads cannot be divided."""
    text = config.get_text_config()
    plan = {key: style for key, style in (text.base_model_tp_plan or {}).items() if IN_A_LAYER.search(key)}
    whole = "--ds_tensor_parallel_size 1, which divides all weights over all devices"
    if not plan:
        raise ConfigError(
            f"{FLAG} {size}: {name} cannot be split, because Transformers has no tensor-parallel plan for "
            f"{text.model_type}",
            try_this=whole,
        )
    others = sorted(set(plan.values()) - {*STYLES, WHOLE})
    if others:
        raise ConfigError(
            f"{FLAG} {size}: {name} cannot be split, because its tensor-parallel plan divides some layers as "
            f"{', '.join(others)}; expected colwise and rowwise",
            try_this=whole,
        )
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    if heads % size:
        raise ConfigError(f"{FLAG} {size} does not divide the {heads} key heads of {name}", try_this=whole)


class TensorParallel:
    """Splits the layers of a network over `size` processes each."""

    def __init__(self, network: Network, device: torch.device, size: int) -> None:
        check_plan(network.decoder.config, type(network.decoder).__name__, size)
        self.size = size
        self.grid = process_grid(device.type, tensor=size)
        self.peers = self.grid["tensor"]
        self.device = device
        self.decoder = network.decoder
        self.steps = 0
        self.layers: list[nn.Module] = []  # the split layers
        self.partial: list[nn.Module] = []  # modules whose peers each compute only a part of the gradient
        plan: dict[str, str] = network.decoder._tp_plan or {}
        # A plan has * for the number of a layer.
        named = [(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), module) for name, module in network.decoder.named_modules()]
        self.styles = {module: plan[name] for name, module in named if plan.get(name)}

    def split(self, layer: nn.Module) -> None:
        """Keep this process's part of the matrices of a layer, which must have their weights."""
        self.layers.append(layer)
        for module in list(layer.modules()):
            style = self.styles.get(module)
            if style == WHOLE:
                self.partial.append(module)
            elif style is not None:
                self._split_matrix(module, style)

    def _split_matrix(self, module: nn.Module, style: str) -> None:
        """Split a linear layer and, if it has adapters, the side of each adapter that has the divided dimension."""
        from peft.tuners.lora import LoraLayer

        targets = [module]
        if isinstance(module, LoraLayer):
            side = module.lora_B if style in COLUMNS else module.lora_A
            targets = [module.get_base_layer(), *side.children()]
        for target in targets:
            weight = target.get_parameter("weight")
            divided = weight.shape[0 if style in COLUMNS else 1]
            if not isinstance(target, nn.Linear) or divided % self.size:
                raise ConfigError(
                    f"{FLAG} {self.size} cannot split a {type(target).__name__} with {divided} "
                    f"{'outputs' if style in COLUMNS else 'inputs'}",
                    try_this=f"{FLAG} 1",
                )
            parallelize_module(target, self.peers, STYLES[style], src_data_rank=None)  # each peer has read the weight

    def sum_partial_gradients(self) -> None:
        """Sum gradients that are spread over the peers; call once per optimizer step."""
        for module in self.partial:
            for parameter in module.parameters():
                shard = _local_gradient(parameter)
                if shard is not None:
                    total = shard.to(self.device)  # a copy if gradients are in host memory, where NCCL cannot reduce
                    dist.all_reduce(total, group=self.peers.get_group())
                    if total is not shard:
                        shard.copy_(total)
        if self.steps < CHECKED_STEPS:
            self._compare_gradients()
        self.steps += 1

    def _compare_gradients(self) -> None:
        """Raise in all processes if peers have different gradients for a parameter that each of them holds whole.

        A plan may omit parameters between a column-wise and a row-wise matrix. Each peer has only a part of their
        gradient, so they would diverge.
        """
        named = self._replicated()
        if not named:
            return
        zero = torch.zeros((), device=self.device)
        shards = [_local_gradient(parameter) for _, parameter in named]
        norms = [zero if shard is None else shard.to(self.device, torch.float32).norm() for shard in shards]
        highest, lowest = torch.stack(norms), torch.stack(norms)  # [parameters]
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.peers.get_group())
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.peers.get_group())
        excess = (highest - lowest) / highest
        excess[highest <= NEGLIGIBLE * highest.max()] = 0.0
        excess = excess.nan_to_num(0.0)  # gradients that overflowed; the loss scale handles them
        dist.all_reduce(excess, dist.ReduceOp.MAX, group=self.grid["data"].get_group())
        worst = int(excess.argmax())
        if float(excess[worst]) > ROUNDING:
            raise BackendError(
                f"{FLAG} {self.size}: processes have different gradients of {named[worst][0]}, because the"
                f" tensor-parallel plan of {self.decoder.config.get_text_config().model_type} omits it",
                try_this=f"{FLAG} 1",
            )

    def _replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters of split layers that every peer holds whole and computes a gradient for."""
        inside = {id(parameter) for layer in self.layers for parameter in layer.parameters()}
        inside -= {id(parameter) for module in self.partial for parameter in module.parameters()}
        found: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.decoder.named_parameters():
            mesh = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
            if id(parameter) in inside and parameter.requires_grad and "tensor" not in mesh:  # peers hold it whole
                found.append((name, parameter))
        return found


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the part of a gradient that this process holds, as a view."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
