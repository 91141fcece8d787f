"""A network inside a DeepSpeed engine: what the engine sees of it, and its weights made whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from openrlhf.models.chunks import Head
from openrlhf.models.forward import Ask, Network, Outputs
from openrlhf.types import Batch


class Shell(nn.Module):
    """A network that takes and gives named tensors: DeepSpeed hooks and compares those, not our dataclasses."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.config = network.decoder.config  # AutoTP reads the model's own plan there
        self.teacher_head: Head | None = None

    def forward(
        self, *, ask: Ask, temperature: float | Tensor, teacher_hidden: Tensor | None = None, **fields: Any
    ) -> dict[str, Tensor]:
        outputs = self.network(
            Batch(**fields),
            ask,
            temperature=temperature,
            teacher_hidden=teacher_hidden,
            teacher_head=self.teacher_head,
        )
        return {name: value for name, value in vars(outputs).items() if value is not None}


class EngineRun:
    """Calls an engine around a `Shell` as an objective calls a network."""

    def __init__(self, engine: Any, shell: Shell) -> None:
        self.engine = engine
        self.shell = shell

    def __call__(
        self,
        batch: Batch,
        ask: Ask,
        *,
        temperature: float | Tensor = 1.0,
        teacher_hidden: Tensor | None = None,
        teacher_head: Head | None = None,
    ) -> Outputs:
        fields = {
            name: value for name, value in vars(batch).items() if name != "extras"
        }  # a network looks at no extras
        self.shell.teacher_head = teacher_head
        return Outputs(**self.engine(ask=ask, temperature=temperature, teacher_hidden=teacher_hidden, **fields))


def mark_experts(network: Network) -> None:
    """ZeRO-3 gathers a block of experts as one: an expert that no token of a rank reached would hang the others."""
    names = {type(module).__name__ for module in network.modules()}
    blocks = [name for name in names if name.endswith(("SparseMoeBlock", "MoE", "Moe", "MoeBlock", "MoeMLP"))]
    if blocks:
        deepspeed.utils.set_z3_leaf_modules(network, blocks)


def unhook_head(network: Network) -> list[nn.Parameter]:
    """Takes ZeRO-3's hooks off the vocabulary head and returns its parameters, for the caller to hold whole.

    The head runs once per chunk of targets, and ranks have different numbers of chunks. ZeRO-3 gathers at each call of
    a module and wants the same calls on every rank: with its hooks on, ranks would wait for each other for ever.
    """
    decoder = network.decoder
    head = decoder.get_output_embeddings()
    if head is None:
        return []
    held = list(head.parameters())
    tied = {id(parameter) for parameter in held}
    for owner in (head, decoder.get_input_embeddings()):
        if any(id(parameter) in tied for parameter in owner.parameters()):
            for module in owner.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
    return held


def hold_whole(parameters: list[nn.Parameter]) -> None:
    """Gathers sharded parameters and leaves them so; those that are whole already cost nothing. Every rank calls it."""
    absent: list[Any] = [parameter for parameter in parameters if is_absent(parameter)]
    if absent:
        absent[0].all_gather(absent)


def is_absent(tensor: Any) -> bool:
    """True for a parameter of which only a shard is here."""
    return hasattr(tensor, "ds_status") and tensor.ds_status != ZeroParamStatus.AVAILABLE


def master_shard(parameter: Any) -> Tensor | None:
    """What this rank has of a parameter's fp32 weights; None where all of it is elsewhere."""
    if hasattr(parameter, "ds_id"):
        return deepspeed.utils.safe_get_local_fp32_param(parameter)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2, and bf16 without ZeRO
        return None if parameter._hp_mapping is None else parameter._hp_mapping.get_hp_fragment()
    return parameter if parameter.dtype == torch.float32 else None


def whole_tensors(root: nn.Module, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a module once, by its name in the state dict, gathered for as long as the caller looks at it.

    Every rank has to go through all of them.
    """
    seen: set[int] = set()
    for name, tensor in root.state_dict(keep_vars=True).items():
        if id(tensor) in seen or (trained_only and not tensor.requires_grad):
            continue
        seen.add(id(tensor))
        with gather_whole([tensor]) as look:
            yield name, look(tensor)


@contextmanager
def gather_whole(tensors: Sequence[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within it a function shows each of these tensors whole. Every rank enters with the same ones."""
    absent = [tensor for tensor in tensors if is_absent(tensor)]
    with deepspeed.zero.GatheredParameters(absent, enabled=bool(absent)):
        yield _whole


def _whole(tensor: Any) -> Tensor:
    alias = tensor.detach()
    if hasattr(tensor, "gather_params"):  # AutoTP's; on an alias, because ZeRO's buffers must stay the weights'
        tensor.gather_params([alias])
    return alias
