"""A network inside a DeepSpeed engine: build the engine, gather its shards, and offload it.

`engine_around` builds the engine. `keep_gathered`, `join_flat_parts` and `gather` join shards; they are collective, so
all ranks must call them with the same parameters. `put_to_sleep` and `wake_up` free device memory while rollout engines
use the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch import distributed as dist

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.forward import Network
from openrlhf.training.backend import Run
from openrlhf.training.deepspeed_config import Section
from openrlhf.training.fsdp_checkpoint import Block
from openrlhf.training.host_memory import HostMemory
from openrlhf.training.tensor_module import TensorModule

Engine: TypeAlias = Any  # the result of deepspeed.initialize, which has no usable annotations
ZeroParameter: TypeAlias = Any  # a parameter to which DeepSpeed may have added attributes, such as ds_status


def engine_around(
    network: Network, sharding: ShardingFlags, config: Section, optimizer: torch.optim.Optimizer | None = None
) -> tuple[Engine, Run]:
    """Build a DeepSpeed engine around a network; also return the callable through which objectives run it."""
    if sharding.zero_stage == 3:
        # Gather each block of experts as a unit. Otherwise a rank that routes no token to some expert would not gather
        # it, and the other ranks would hang.
        names = {type(module).__name__ for module in network.modules()}
        blocks = [name for name in names if name.endswith(("SparseMoeBlock", "MoE", "Moe", "MoeBlock", "MoeMLP"))]
        if blocks:
            deepspeed.utils.set_z3_leaf_modules(network, blocks)
    module = TensorModule(network)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, module.run_by(engine)


def unhook_head(network: Network) -> list[nn.Parameter]:
    """Remove ZeRO-3's hooks from the vocabulary head and return its parameters, which the caller must keep gathered.

    The head runs once per chunk of targets, and ranks have different numbers of chunks. ZeRO-3 gathers at each call of
    a module and expects the same calls on every rank, so with its hooks the ranks would deadlock. Embeddings that are
    tied to the head lose their hooks too.
    """
    decoder = network.decoder
    head = decoder.get_output_embeddings()
    if head is None:
        return []
    parameters = list(head.parameters())
    tied = {id(parameter) for parameter in parameters}
    for owner in (head, decoder.get_input_embeddings()):
        if any(id(parameter) in tied for parameter in owner.parameters()):
            for module in owner.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
    return parameters


def keep_gathered(parameters: list[nn.Parameter]) -> None:
    """Gather sharded parameters and keep them gathered; a no-op for those that already are. Every rank must call it."""
    sharded: list[ZeroParameter] = [parameter for parameter in parameters if is_sharded(parameter)]
    if sharded:
        sharded[0].all_gather(sharded)


def is_sharded(tensor: ZeroParameter) -> bool:
    """Return True for a parameter of which this rank holds only a shard."""
    return hasattr(tensor, "ds_status") and tensor.ds_status != ZeroParamStatus.AVAILABLE


def master_shard(parameter: ZeroParameter) -> Tensor | None:
    """Return this rank's shard of a parameter's fp32 weights, or None if it holds none of them."""
    if hasattr(parameter, "ds_id"):
        return deepspeed.utils.safe_get_local_fp32_param(parameter)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2, and bf16 without ZeRO
        return None if parameter._hp_mapping is None else parameter._hp_mapping.get_hp_fragment()
    return parameter if parameter.dtype == torch.float32 else None


def flat_part(tensor: ZeroParameter) -> tuple[Tensor, Block]:
    """Return this rank's part of a flattened tensor that ZeRO-3 has sharded, or the whole of any other tensor."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach(), Block.whole(tensor.shape)
    group = tensor.ds_process_group
    block = Block.whole((tensor.ds_numel,)).divided(0, dist.get_rank(group), dist.get_world_size(group))
    return tensor.ds_tensor.detach().flatten()[: block.size[0]], block


def join_flat_parts(tensor: ZeroParameter, part: Tensor) -> Tensor:
    """Return a whole tensor like the given one; each rank passes values for its `flat_part`."""
    if not hasattr(tensor, "ds_tensor"):
        return part
    group = tensor.ds_process_group
    padded = part.new_zeros(math.ceil(tensor.ds_numel / dist.get_world_size(group)))
    padded[: len(part)] = part
    whole = part.new_empty(len(padded) * dist.get_world_size(group))
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[: tensor.ds_numel].view(tensor.ds_shape)


@contextmanager
def gather(tensors: Sequence[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gather these tensors and yield a function that returns each in full. All ranks pass the same tensors."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        yield _full


def _full(tensor: ZeroParameter) -> Tensor:
    alias = tensor.detach()
    if hasattr(tensor, "gather_params"):  # AutoTP; gather an alias: the weight must keep pointing into ZeRO's buffer
        tensor.gather_params([alias])
    return alias


def put_to_sleep(
    engine: Engine, network: Network, optimizer: torch.optim.Optimizer, stage: int, host: HostMemory
) -> None:
    """Move weights, gradients and optimizer state to host memory; `stage` is the ZeRO stage.

    DeepSpeed offloads most of its own state, and `host` stores the rest: everything without ZeRO, frozen weights at
    stages 1 to 3, and masters and optimizer state at stage 3.
    """
    frozen: list[ZeroParameter] = [parameter for parameter in network.parameters() if not parameter.requires_grad]
    if stage == 3:  # DeepSpeed offloads only the state of its own optimizers, and no weights at all if some are frozen
        gradients = [State.lp_grads, State.contiguous_grad_buffer]
        engine.offload_states(include=gradients if frozen else [State.lp_params, *gradients])
    elif stage > 0:
        engine.offload_states(include=None)

    states = [value for slots in optimizer.state.values() for value in slots.values()]
    if stage == 0:
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        host.take([*network.parameters(), *masters, *states])
    elif stage == 3:
        shards = [parameter.ds_tensor for parameter in frozen]
        host.take([*shards, *engine.optimizer.fp32_partitioned_groups_flat, *states])
    else:
        host.take(frozen)
    torch.cuda.empty_cache()


def wake_up(engine: Engine, stage: int, host: HostMemory) -> None:
    """Undo `put_to_sleep`."""
    host.give_back()
    if stage > 0:
        engine.reload_states()
