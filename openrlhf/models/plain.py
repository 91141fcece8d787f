"""Weights of a network as a plain model: adapters merged, 4-bit weights dequantised, experts as separate tensors.

An inference engine expects the names and values that `save_pretrained` would write for such a model. They are computed
one layer at a time, without changing the network or keeping a second model in memory:

    modules  ->  PlainTensor: name, tensor, adapters  ->  gather, dequantise, merge  ->  rename and split as in a file

Weight syncs send the tensors of `checkpoint_weights`. `HFEngine` copies received tensors into `checkpoint_places`, the
inverse mapping from the name of each checkpoint tensor to its memory in the network.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.errors import RolloutError
from openrlhf.models.checkpoint_parts import ScatteredTensorError, checkpoint_parts
from openrlhf.models.forward import Network
from openrlhf.models.router_replay import RoutedLayers

Unshard = Callable[[Tensor], Tensor]  # returns the complete, detached tensor
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Unshard]]  # gathers sharded tensors within its context
Adapter: TypeAlias = Any  # a peft.tuners.lora.LoraLayer; its methods depend on the adapted layer
LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True)
class PlainTensor:
    """One tensor of the plain model: its name, the network's tensor, and the adapters to merge into it."""

    name: str
    tensor: Tensor
    adapters: Sequence[Adapter] = ()

    @property
    def needs(self) -> Iterator[Tensor]:
        """The network's tensors that this tensor is computed from."""
        yield self.tensor
        for layer in self.adapters:
            yield from (weight for name, weight in layer.named_parameters() if not name.startswith("base_layer."))

    def compute(self, unshard: Unshard) -> Tensor:
        """Dequantise the tensor and merge its adapters with the same rounding as PEFT: once per adapter."""
        if type(self.tensor).__name__ == "Params4bit":
            from bitsandbytes.functional import dequantize_4bit

            packed: Any = self.tensor
            weight = dequantize_4bit(packed.data, packed.quant_state)  # returns the compute dtype
        else:
            weight = unshard(self.tensor)
        for layer in self.adapters:
            for name in layer.active_adapters:
                variant = layer.lora_variant.get(name)  # such as DoRA
                if variant is not None:
                    weight = variant.merge_safe(layer, name, weight)
                else:
                    weight = (weight + layer.get_delta_weight(name)).to(weight.dtype)
        return weight


def gather_nothing(tensors: Sequence[Tensor]) -> AbstractContextManager[Unshard]:
    """The `Gather` for a network that is not sharded."""
    return nullcontext(Tensor.detach)


@torch.no_grad()
def checkpoint_weights(network: Network, gather: Gather = gather_nothing) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor), without tied copies; a tensor is valid until the next layer is reached."""
    for layer in plain_layers(network.decoder):
        with gather([tensor for plain in layer for tensor in plain.needs]) as unshard:
            # Undo the fusing and renaming that Transformers does on loading. Keep no reference to the tensors, to free
            # them before the next layer is computed.
            yield from revert_weight_conversion(
                network.decoder, {plain.name: plain.compute(unshard) for plain in layer}
            ).items()


def plain_layers(decoder: PreTrainedModel) -> Iterator[list[PlainTensor]]:
    """Yield each tensor of the plain model once, in the order of the modules.

    The tensors of a decoder layer are yielded together, because a checkpoint format may fuse them.
    """
    unsaved = set(decoder._keys_to_ignore_on_save or ())
    seen: set[int] = set()
    once: list[PlainTensor] = []
    for plain in _plain_tensors(decoder, ""):
        if id(plain.tensor) not in seen and plain.name not in unsaved:
            seen.add(id(plain.tensor))
            once.append(plain)
    for _, layer in groupby(once, lambda plain: match.group() if (match := LAYER.match(plain.name)) else plain.name):
        yield list(layer)


def _plain_tensors(module: nn.Module, prefix: str) -> Iterator[PlainTensor]:
    """Yield the tensors of a module and its children, with the names that they would have without adapters."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _plain_tensors(module.modules_to_save[module.active_adapters[0]], prefix)
        return
    adapters: dict[str, list[Adapter]] = {}  # name of the adapted parameter -> adapters
    while isinstance(module, LoraLayer):  # adapters of experts are nested, one for each parameter
        adapter: Adapter = module
        adapters.setdefault(vars(adapter).get("parameter_name", "weight"), []).append(adapter)
        module = adapter.base_layer
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield PlainTensor(prefix + name, tensor, adapters.get(name, []))
    for name, child in module._modules.items():
        if child is not None:
            yield from _plain_tensors(child, f"{prefix}{name}.")


def checkpoint_places(network: Network) -> dict[str, Tensor]:
    """Return views of a plain network's tensors by checkpoint name; copy into them to load weights."""
    places: dict[str, Tensor] = {}
    for layer in plain_layers(network.decoder):
        own = {plain.name: plain.tensor.detach() for plain in layer}
        kept = {id(tensor): name for name, tensor in revert_weight_conversion(network.decoder, dict(own)).items()}
        moved = {name: tensor for name, tensor in own.items() if id(tensor) not in kept}  # converted on saving
        places |= {kept[id(tensor)]: tensor for tensor in own.values() if id(tensor) in kept}
        if moved:
            shapes = {name: tensor.shape for name, tensor in moved.items()}
            try:
                parts = checkpoint_parts(network.decoder, shapes, exact=True)
            except ScatteredTensorError as error:
                raise RolloutError(
                    f"{type(network.decoder).__name__} cannot receive new weights in the in-process engine: its"
                    f" checkpoint tensor {error} is not part of a single tensor in memory",
                    try_this="vLLM (--vllm_num_engines 1), or another model",
                ) from None
            places |= {part.name: part.of(moved[name]) for name, own in parts.items() for part in own}
    return places


@torch.no_grad()
def load_weights(places: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copy each tensor into the network and yield it; iterate over the result, because copying is lazy."""
    for name, tensor in weights:
        if name not in places:
            raise RolloutError(f"received weights for {name}, which this network does not have")
        places[name].copy_(tensor)
        yield name, tensor


@torch.no_grad()
def plain_copy(network: Network) -> Network:
    """Return an independent network with the same outputs, but without adapters or quantisation."""
    if network.model is network.decoder:
        return copy.deepcopy(network)
    decoder: Any = network.decoder  # Any, because private attributes are used below
    config = copy.deepcopy(decoder.config)
    vars(config).pop("quantization_config", None)
    model = type(decoder)._from_config(
        config, dtype=config.dtype, attn_implementation=decoder.config._attn_implementation
    )
    model.generation_config = copy.deepcopy(decoder.generation_config)
    model._weight_conversions = decoder._weight_conversions  # so that checkpoint names stay the same
    made = Network(model.to(decoder.device), self_test=network.self_test).requires_grad_(False)
    made.layout = network.layout
    made.routed = None if network.routed is None else RoutedLayers(model)
    for _ in load_weights(checkpoint_places(made), checkpoint_weights(network)):
        pass
    return made
