"""The layers of a vLLM model: load new weights into them, and read back the weights that they compute with.

On CPU, vLLM packs matrices for its kernels after loading and computes with the packed copies. Its layer-wise reload
packs the new weights again, with two exceptions that `reloading` corrects: a head that shares the embedding's weight
keeps a packed copy of the old weight, and experts are packed only when their kernel is built. On every device, the
reload loses the weights that GPT-OSS copies into its layers without their loaders; `keep_direct_copies` keeps them.

To verify a load, some columns of each tensor are compared: `sampled` reads them from the received tensor, `read_back`
from the weights that the layers compute with. `vllm_worker.py` calls all three functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from openrlhf.rollout.checksum import checksum

VLLMLayer: TypeAlias = Any  # a layer of vLLM or its method, whose attributes depend on platform and quantisation
COPIED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # loading these layers is a plain copy
COLUMNS = 64  # columns to read back per matrix, approximately


def method_of(module: nn.Module) -> QuantizeMethodBase | None:
    """Return vLLM's quantisation method of a module, which stores and applies its weights; None without one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


@contextmanager
def reloading(model: nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """Convert the weights that are loaded in this context to the form that vLLM's kernels expect."""
    kernels: list[tuple[VLLMLayer, object]] = []
    if current_platform.is_cpu():
        # Detach the kernels of all experts. Without a kernel, vLLM treats a load as the first one: it pads and packs
        # the experts, and builds the kernel.
        methods: list[VLLMLayer] = [method_of(module) for module in model.modules()]
        kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method, _ in kernels:
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        with keep_direct_copies(model):
            yield
    finally:
        finalize_layerwise_reload(model, model_config)
        for method, kernel in kernels:
            if method.moe_kernel is None:  # no weights arrived for these experts
                method.moe_kernel = kernel
        if current_platform.is_cpu():
            pack_shared_weights(model)


@contextmanager
def keep_direct_copies(model: nn.Module) -> Iterator[None]:
    """Let a layer-wise reload process the experts and attention sinks of GPT-OSS.

    A reload gives layers tensors without memory and collects the weights that their loaders receive. GPT-OSS bypasses
    the loaders and writes these tensors itself, so they are given memory first and counted as loaded afterwards.
    """
    if not type(model).__name__.startswith("GptOss"):
        yield
        return
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    written = [module for module in model.modules() if {"sinks", "w13_weight"} & module._parameters.keys()]
    for module in written:
        materialize_layer(module, get_layerwise_info(module))
    yield
    for module in written:
        info: VLLMLayer = get_layerwise_info(module)
        if info.can_load() and info.load_numel == 0:
            info.load_numel, info.load_numel_total = 1, 2  # partly loaded: finalising processes the layer as it is


def pack_shared_weights(model: nn.Module) -> None:
    """Pack embeddings and heads again if they share their weight with another module."""
    for users in weight_users(model):
        for module in users.values() if len(users) > 1 else ():
            method = method_of(module)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)


def weight_users(model: nn.Module) -> Collection[dict[str, nn.Module]]:
    """Return, for each weight, the modules that hold it, by module name; quantised weights are omitted."""
    found: defaultdict[int, dict[str, nn.Module]] = defaultdict(dict)  # by id of the weight
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.is_floating_point() and weight.element_size() > 1:  # else it is quantised
            found[id(weight)][name] = module
    return found.values()


@dataclass(frozen=True)
class Sampled:
    """Checksums that identify a tensor: of some columns and rows of a matrix, or of all elements otherwise."""

    shape: tuple[int, ...]
    columns: int  # checksum
    rows: int  # checksum of columns of the transposed matrix, which some checkpoints store


def sampled(tensor: Tensor, dtype: torch.dtype) -> Sampled:
    """Sample a tensor after rounding it to the engine's `dtype`, as loading does."""
    kept = tensor.detach()
    if kept.dim() != 2:
        return Sampled(tuple(kept.shape), _sum(kept.to(dtype)), 0)
    some_columns, some_rows = kept[:, _places(kept.shape[1], kept)], kept[_places(kept.shape[0], kept)]
    return Sampled(tuple(kept.shape), _sum(some_columns.to(dtype)), _sum(some_rows.T.to(dtype)))


def _places(size: int, like: Tensor) -> Tensor:
    """Return indices that are spread evenly over a dimension."""
    return torch.arange(0, size, max(1, size // COLUMNS), device=like.device)


def _sum(tensor: Tensor) -> int:
    return checksum(tensor + 0.0)  # turn -0.0 into 0.0, because a product with a unit vector loses the sign


def read_back(model: nn.Module, fused: Mapping[str, Sequence[str]], arrived: Mapping[str, Sampled]) -> frozenset[str]:
    """Return the names of tensors that every layer uses exactly as they arrived.

    Tensors that vLLM stores in its own form (experts, shards, reordered rows) are omitted; comparing log-probs covers
    them.
    """
    if not arrived or get_tensor_model_parallel_world_size() > 1:
        return frozenset()
    found: dict[str, bool] = {}
    for users in weight_users(model):
        for module in users.values():
            held = _computed_with(module)
            for user in users:
                # Checkpoint names of the tensors that make up the weight, in order.
                above, _, own = user.rpartition(".")
                names = [f"{above}.{part}.weight".removeprefix(".") for part in fused.get(own, [own])]
                start = 0
                for name in names if arrived.keys() >= set(names) else ():
                    sent = arrived[name]
                    part = held[start : start + sent.shape[0]]  # [rows of this part, sampled columns]
                    turned = held[: sent.shape[-1]]  # a matrix that a checkpoint stores transposed is never fused
                    same = _sum(part) == sent.columns or (len(names) == 1 and _sum(turned) == sent.rows)
                    found[name] = found.get(name, True) and same
                    start += sent.shape[0]
    return frozenset(name for name, same in found.items() if same)


def _computed_with(module: nn.Module) -> Tensor:
    """Return the weight that a module computes with: all of a vector, or some columns of a matrix [rows, columns].

    A packed matrix cannot be inspected, but its product with a unit vector is exactly one of its columns.
    """
    layer: VLLMLayer = module
    weight: Tensor = layer.weight
    method = method_of(module)
    packed = isinstance(method, UnquantizedLinearMethod) or isinstance(module, ParallelLMHead)
    if packed and hasattr(module, "cpu_linear"):
        size = layer.input_size if isinstance(method, UnquantizedLinearMethod) else layer.embedding_dim
        places = _places(size, weight)
        units = torch.zeros(len(places), size, dtype=weight.dtype)  # [sampled columns, columns]
        units[torch.arange(len(places)), places] = 1.0
        return layer.cpu_linear(units, weight, None).T  # [rows, sampled columns]
    return weight[:, _places(weight.shape[1], weight)] if weight.dim() == 2 else weight
