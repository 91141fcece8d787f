"""Sleep and wake of a DeepSpeed engine: free its device memory while rollout engines use the device.

DeepSpeed can offload most of its own state; `HostMemory` takes the rest. Which tensors are left depends on the ZeRO
stage.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from torch import Tensor

from openrlhf.models.forward import Network
from openrlhf.training.host_memory import HostMemory


def put_to_sleep(engine: Any, network: Network, optimizer: torch.optim.Optimizer, stage: int, host: HostMemory) -> None:
    """Move weights, gradients and optimizer state to host memory."""
    if stage > 0:
        engine.offload_states(include=_sharded_states(network) if stage == 3 else None)
    host.take(_left_behind(engine, network, optimizer, stage))
    torch.cuda.empty_cache()


def wake_up(engine: Any, stage: int, host: HostMemory) -> None:
    host.give_back()
    if stage > 0:
        engine.reload_states()


def _sharded_states(network: Network) -> list[State]:
    """List what DeepSpeed can offload at stage 3.

    It offloads only its own optimizers, and no weights if some of them are frozen.
    """
    states = [State.lp_grads, State.contiguous_grad_buffer]
    return states if any(True for _ in _frozen(network)) else [State.lp_params, *states]


def _frozen(network: Network) -> Iterator[Any]:
    return (parameter for parameter in network.parameters() if not parameter.requires_grad)


def _left_behind(engine: Any, network: Network, optimizer: torch.optim.Optimizer, stage: int) -> Iterator[Tensor]:
    """Yield what DeepSpeed does not offload.

    Without ZeRO that is everything; with it, frozen weights, and at stage 3 also masters and optimizer state.
    """
    if stage == 0:
        yield from network.parameters()
        yield from (master for group in optimizer.param_groups for master in group["params"])
    elif stage == 3:
        yield from (parameter.ds_tensor for parameter in _frozen(network))
        yield from engine.optimizer.fp32_partitioned_groups_flat
    else:
        yield from _frozen(network)
    if stage in (0, 3):
        yield from (value for slots in optimizer.state.values() for value in slots.values())
