"""A network sharded by PyTorch's FSDP2 (`fully_shard`): its groups of parameters, and how to gather them.

Each decoder layer is a group, which is gathered while the layer runs. The other parameters, embeddings and heads, are
the root group, which is gathered while the whole network runs: a head is applied to chunks of targets, and ranks have
different numbers of chunks, so gathering it call by call would deadlock. A sharded parameter is a DTensor, of which
each rank holds a range of rows, its shard. The functions that gather are collective: all ranks call them in the same
order.

With --expert_parallel_size, the experts of a layer are a separate group, sharded over the ranks that hold the same
experts (`expert_parallel.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from openrlhf.errors import ConfigError
from openrlhf.models.deferred import deferred_weights
from openrlhf.models.forward import Network, Requested, Teacher
from openrlhf.models.plain import Gather, Unshard
from openrlhf.training.audit import ONE_EXPERT
from openrlhf.training.backend import Run
from openrlhf.training.compilation import decoder_layers
from openrlhf.training.expert_parallel import (
    divide_experts,
    exchange_of,
    gather_experts,
    modules_to_divide,
)
from openrlhf.training.fsdp_checkpoint import Block
from openrlhf.training.process_grid import process_grid
from openrlhf.training.tensor_module import TensorModule
from openrlhf.training.tensor_parallel import TensorParallel
from openrlhf.types import Batch

Root: TypeAlias = Any  # the TensorModule of a network, which `fully_shard` has also made an FSDPModule
ExpertGroups: TypeAlias = Mapping[int, dist.ProcessGroup]  # expert group by id of each divided parameter


def shard_network(
    network: Network,
    device: torch.device,
    *,
    tensor_parallel: TensorParallel | None = None,
    expert_parallel_size: int = 1,
    offload: bool = False,
    keep_head: bool = False,
) -> Root:
    """Shard a network layer by layer on this device, and return the module to call.

    Trained weights are kept in fp32; passes compute in the network's own precision. With `offload`, shards are in host
    memory between passes. `keep_head` keeps the vocabulary head whole, because distillation applies the head of a
    teacher outside the teacher's forward pass.
    """
    has_experts = any(ONE_EXPERT.search(name) for name, _ in network.named_parameters())
    if has_experts and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"--backend fsdp cannot train {type(network.decoder).__name__}, in which each expert is a module, with"
            f" torch {torch.__version__}",
            try_this="torch 2.13, or --backend deepspeed",
        )
    network.computes_in = network.dtype
    half = network.dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=network.dtype if half else None,
        reduce_dtype=torch.float32 if half else None,  # gradients are summed over ranks and micro-batches in fp32
        cast_forward_inputs=False,
    )
    everyone = init_device_mesh(device.type, (dist.get_world_size(),))
    host = CPUOffloadPolicy() if offload and device.type != "cpu" else OffloadPolicy()
    root = TensorModule(network)
    files = deferred_weights(network.decoder)
    head = network.decoder.get_output_embeddings() if keep_head else None
    kept: set[nn.Parameter] = set()
    if head is not None:
        files.fill(head.parameters(), copy=True)
        kept = set(head.to(device).parameters())
    divided = modules_to_divide(network, expert_parallel_size) if expert_parallel_size > 1 else []
    ranks = process_grid(device.type, experts=expert_parallel_size) if divided else everyone
    for module in (*divided, *separate_layers(network), root):
        files.fill(module.parameters())
        if module in divided:
            divide_experts(module, ranks)
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(torch.float32)
        mesh = ranks["data"] if module in divided else everyone
        if tensor_parallel is not None and module is not root:
            tensor_parallel.split(module)
            mesh = tensor_parallel.grid["data"]  # peers hold different parts, each of which other processes also hold
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=host, ignored_params=kept)
    files.must_be_used_up()
    for group in groups_of(root):
        # Losses are divided by totals over all ranks, so gradients are added up, not averaged.
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        if tensor_parallel is not None and group is root:
            group.set_gradient_divide_factor(tensor_parallel.size)  # all peers have computed the same gradient
        if has_experts:  # ranks may route tokens to different experts; the gradient of an unused one is zero
            group.set_reduce_scatter_unused_params(True)
    return root


def separate_layers(network: Network) -> list[nn.Module]:
    """Return the layers that share no parameter with other parts; the others can only be gathered with the root."""
    layers = decoder_layers(network)
    inner = {module for layer in layers for module in layer.modules()}
    outer = (module.parameters(recurse=False) for module in network.modules() if module not in inner)
    uses = Counter(parameter for part in (*map(nn.Module.parameters, layers), set(chain(*outer))) for parameter in part)
    return [layer for layer in layers if all(uses[parameter] == 1 for parameter in layer.parameters())]


def groups_of(root: Root) -> list[FSDPModule]:
    """Return the modules whose parameters are gathered together: the root and each layer."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def run_sharded(root: Root) -> Run:
    """Return the callable through which objectives run a sharded network."""
    call = root.run_by(root)

    def run(
        batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
    ) -> Requested:
        try:
            outputs = call(batch, kind, temperature=temperature, teacher=teacher)
        except Exception:
            if hasattr(root, "reset_iter_state"):  # since torch 2.13; the self-test tries another layout after an error
                root.reset_iter_state()
            raise
        if not torch.is_grad_enabled():
            root.reshard()  # otherwise done by the backward pass
        return outputs

    return run


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory, or a tensor that is not sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def expert_groups(root: Root) -> ExpertGroups:
    """Return the expert group of each parameter whose experts are divided."""
    exchanges = {module: exchange for module in root.modules() if (exchange := exchange_of(module))}
    return {id(parameter): made.group for module, made in exchanges.items() for parameter in module.parameters()}


def block_of(tensor: Tensor, experts: dist.ProcessGroup | None = None) -> Block:
    """Return the part of a tensor that this rank holds; `experts` is the group that its experts are divided over.

    FSDP divides the parts that tensor and expert parallelism leave, so the last dimension of the mesh divides first.
    """
    block = Block.whole(tensor.shape)
    if experts is not None:
        size = dist.get_world_size(experts)
        block = Block.whole((size * tensor.shape[0], *tensor.shape[1:])).divided(0, dist.get_rank(experts), size)
    if isinstance(tensor, DTensor):
        mesh, position = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert position is not None, "every rank holds a part of every tensor"
        placements: list[Any] = list(tensor.placements)  # dividing placements have a `dim`, but no common base class
        for number, placement in reversed(list(enumerate(placements))):
            if not placement.is_replicate():
                block = block.divided(placement.dim, position[number], mesh.size(number))
    return block


def num_copies(tensor: Tensor, experts: dist.ProcessGroup | None = None) -> int:
    """Return how many ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    parts = math.prod(size for size, place in sizes if not place.is_replicate())
    return dist.get_world_size() // (parts * (1 if experts is None else dist.get_world_size(experts)))


def gather_each(root: Root, dtype: torch.dtype, device: torch.device) -> Gather:
    """Return a `Gather` that gathers each tensor when it is needed, in this precision and on this device."""
    experts = expert_groups(root)

    def unshard(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        return gather_whole(tensor, local_shard(tensor).to(device, dtype), experts.get(id(tensor)))

    @contextmanager
    def gather(tensors: Sequence[Tensor]) -> Iterator[Unshard]:
        yield unshard

    return gather


def gather_whole(tensor: DTensor, shard: Tensor, experts: dist.ProcessGroup | None = None) -> Tensor:
    """Return a whole tensor, given this rank's shard of it; the shards are laid out like those of `tensor`.

    The division by FSDP is undone first, then the one by tensor parallelism or, with `experts`, expert parallelism.
    """
    mesh, placements = tensor.device_mesh, list(tensor.placements)
    whole = DTensor.from_local(shard, mesh, placements, shape=tensor.shape, stride=tensor.stride())
    for number in range(mesh.ndim):
        placements[number] = Replicate()
        whole = whole.redistribute(placements=placements)
    return whole.to_local() if experts is None else gather_experts(whole.to_local(), experts)


class GatheredPlace(NamedTuple):
    """The place of a sharded parameter: the group that gathers it, and the module and attribute that hold it."""

    group: FSDPModule
    module: nn.Module
    name: str


def gather_groups(root: Root) -> Gather:
    """Return a `Gather` that gathers whole groups within its context, so that modules such as adapters can be used.

    The parts of tensor-parallel peers and the experts of other ranks are also gathered.
    """
    places: dict[int, GatheredPlace] = {}
    for group in groups_of(root):  # layers come after the root, so their parameters get the right group
        assert isinstance(group, nn.Module)
        for module in group.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places[id(parameter)] = GatheredPlace(group, module, name)

    experts = expert_groups(root)

    def unshard(tensor: Tensor) -> Tensor:
        place = places.get(id(tensor))
        found = (tensor if place is None else place.module.get_parameter(place.name)).detach()
        return gather_experts(found, experts[id(tensor)]) if id(tensor) in experts else found

    @contextmanager
    def gather(tensors: Sequence[Tensor]) -> Iterator[Unshard]:
        needed = {id(place.group): place.group for tensor in tensors if (place := places.get(id(tensor)))}
        for group in needed.values():
            group.unshard()
        parts: list[tuple[GatheredPlace, nn.Parameter]] = []
        for place in places.values():
            part = place.module._parameters[place.name]
            if id(place.group) in needed and isinstance(part, DTensor):
                parts.append((place, part))
                whole = nn.Parameter(part.full_tensor(), requires_grad=False)
                place.module._parameters[place.name] = whole
        try:
            yield unshard
        finally:
            for place, part in parts:
                place.module._parameters[place.name] = part
            for group in needed.values():
                group.reshard()

    return gather
