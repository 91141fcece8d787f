"""Tensor parallelism under FSDP: adjacent processes divide the matrices of each layer, as the model's own plan says.

Transformers has a plan for most families, such as `layers.*.self_attn.q_proj: colwise`. A column-wise matrix gives each
process some of the outputs (attention heads), and the row-wise matrix after it takes them as inputs and adds up the
results of all processes. `TensorParallel` applies the plan with PyTorch's parallel styles, one layer at a time, before
FSDP shards what is left over the other processes, so that a matrix is divided over a grid. With 4 processes and
--ds_tensor_parallel_size 2:

    matrix rows     [ upper half       ] [ lower half       ]      ranks 0 1 | 2 3    tensor-parallel peers
    FSDP            [ rank 0 ][ rank 2 ] [ rank 1 ][ rank 3 ]

Embeddings, norms and heads are computed by all peers. Models that are not trained are not split.
"""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig

from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network

COLUMNS = {  # by name in a plan
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


@cache
def device_grid(device_type: str, size: int) -> DeviceMesh:
    """Return all processes as a grid, in which each row is a group of tensor-parallel peers.

    It is cached, because all models of a process share its groups.
    """
    return init_device_mesh(device_type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "tensor"))


def data_ranks(device_type: str, size: int) -> dist.ProcessGroup:
    """Return the group with one process of each data-parallel rank: those at the same place among their peers."""
    if size > 1:
        return device_grid(device_type, size)["data"].get_group()
    world = dist.group.WORLD
    assert world is not None
    return world


class TensorParallel:
    """Splits the layers of a network over `size` processes each."""

    def __init__(self, network: Network, device: torch.device, size: int) -> None:
        check_plan(network.decoder.config, type(network.decoder).__name__, size)
        self.size = size
        self.grid = device_grid(device.type, size)
        self.peers = self.grid["tensor"]
        self.partial: list[nn.Module] = []  # modules whose parameters have a part of their gradient on each peer
        plan: dict[str, str] = network.decoder._tp_plan or {}
        named = network.decoder.named_modules()
        self.styles = {module: style for name, module in named if (style := plan.get(_without_numbers(name)))}

    def split(self, layer: nn.Module) -> None:
        """Keep this process's part of the matrices of a layer, which must have their weights."""
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
        """Add up the gradients of which each peer has a part; call once for each optimizer step."""
        for module in self.partial:
            for parameter in module.parameters():
                gradient = parameter.grad
                if gradient is not None:
                    shard: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    dist.all_reduce(shard, group=self.peers.get_group())


def _without_numbers(name: str) -> str:
    """Return the name of a module as in a plan, with * for the number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
