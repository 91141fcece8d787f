"""A network as the equivalent plain model: adapters merged, 4-bit weights dequantised, experts one by one.

An inference engine expects the names and values that `save_pretrained` of such a model would write. They are computed
one layer at a time, so that there is never a second model in memory, and the network itself is not changed. Weight
syncs read from `checkpoint_weights`; `HFEngine` loads what arrives through `checkpoint_places`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.errors import RolloutError
from openrlhf.models.forward import Network

Look = Callable[[Tensor], Tensor]  # returns a tensor of the network, unsharded
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Look]]  # gathers sharded tensors within its context
LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True)
class Part:
    """One tensor of the plain model: its name there, the tensors that it needs, and how to compute it from these."""

    name: str
    needs: tuple[Tensor, ...]
    make: Callable[[Look], Tensor]


def here(tensors: Sequence[Tensor]) -> AbstractContextManager[Look]:
    """Gather nothing: for a network that is not sharded."""
    return nullcontext(Tensor.detach)


@torch.no_grad()
def checkpoint_weights(network: Network, gather: Gather = here) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor by its checkpoint name, without tied copies; a tensor is valid until the next layer's."""
    for layer in _layers(plain_parts(network.decoder)):
        with gather([tensor for part in layer for tensor in part.needs]) as look:
            yield from _as_saved(network.decoder, {part.name: part.make(look) for part in layer}).items()


def plain_parts(decoder: PreTrainedModel) -> Iterator[Part]:
    """Yield each tensor of the plain model once, in the order of the modules."""
    unsaved = set(decoder._keys_to_ignore_on_save or ())
    seen: set[int] = set()
    for part in _parts(decoder, ""):
        if id(part.needs[0]) not in seen and part.name not in unsaved:
            seen.add(id(part.needs[0]))
            yield part


def _parts(module: nn.Module, prefix: str) -> Iterator[Part]:
    """Yield the parts of a module and its children, under the names that they have without adapters."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _parts(module.modules_to_save[module.active_adapters[0]], prefix)
        return
    adapters: dict[str, list[Any]] = {}  # by name of the parameter that they change
    while isinstance(module, LoraLayer):  # adapters of experts are nested, one for each parameter
        around: Any = module
        adapters.setdefault(vars(around).get("parameter_name", "weight"), []).append(around)
        module = around.base_layer
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield _part(prefix + name, tensor, adapters.get(name, []))
    for name, child in module._modules.items():
        if child is not None:
            yield from _parts(child, f"{prefix}{name}.")


def _part(name: str, tensor: Tensor, adapters: list[Any]) -> Part:
    if not adapters:
        return Part(name, (tensor,), lambda look: _unpacked(tensor, look))
    small = [weight for layer in adapters for weight in _adapter_weights(layer)]
    return Part(name, (tensor, *small), lambda look: _merged(_unpacked(tensor, look), adapters))


def _adapter_weights(layer: nn.Module) -> Iterator[Tensor]:
    return (weight for name, weight in layer.named_parameters() if not name.startswith("base_layer."))


def _unpacked(tensor: Tensor, look: Look) -> Tensor:
    """Dequantise a 4-bit weight of bitsandbytes to its compute precision; return any other as it is."""
    if type(tensor).__name__ != "Params4bit":
        return look(tensor)
    from bitsandbytes.functional import dequantize_4bit

    packed: Any = tensor
    return dequantize_4bit(packed.data, packed.quant_state)


def _merged(weight: Tensor, adapters: list[Any]) -> Tensor:
    """Merge adapters into a weight as PEFT does: add in the adapters' precision, round once per adapter."""
    for layer in adapters:
        for name in layer.active_adapters:
            variant = layer.lora_variant.get(name)  # such as DoRA
            if variant is not None:
                weight = variant.merge_safe(layer, name, weight)
            else:
                weight = (weight + layer.get_delta_weight(name)).to(weight.dtype)
    return weight


def _layers(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group the parts that a checkpoint's format may combine: those of one decoder layer; any other part is alone."""

    def layer(part: Part) -> str:
        found = LAYER.match(part.name)
        return found.group() if found else part.name

    for _, group in groupby(parts, layer):
        yield list(group)


def _as_saved(decoder: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the fusing and renaming of tensors that Transformers does on loading."""
    return revert_weight_conversion(decoder, tensors)


def checkpoint_places(network: Network) -> dict[str, Tensor]:
    """Return views of a plain network's memory, by the names of `checkpoint_weights`: copy into them to load."""
    places: dict[str, Tensor] = {}
    for layer in _layers(plain_parts(network.decoder)):
        own = {part.name: part.needs[0].detach() for part in layer}
        kept = {id(tensor): name for name, tensor in _as_saved(network.decoder, dict(own)).items()}
        moved = {name: tensor for name, tensor in own.items() if id(tensor) not in kept}  # that saving converts
        places |= {kept[id(tensor)]: tensor for tensor in own.values() if id(tensor) in kept}
        if moved:
            places |= _views(network.decoder, moved)
    return places


def _views(decoder: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return views of fused tensors by the names of their parts in a checkpoint.

    Element numbers take the place of the weights and are converted like these, which shows where each element goes. A
    saved tensor whose numbers form a regular pattern within one source is a strided view of that source.
    """
    starts: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        starts[name] = total
        total += tensor.numel()
    numbers = torch.arange(total)
    given = {name: numbers[starts[name] :][: tensor.numel()].view(tensor.shape) for name, tensor in tensors.items()}
    views: dict[str, Tensor] = {}
    for saved, found in _as_saved(decoder, given).items():
        first = int(found.flatten()[0])
        steps = [int(found.select(d, 1).flatten()[0]) - first if size > 1 else 1 for d, size in enumerate(found.shape)]
        source = max((name for name in starts if starts[name] <= first), key=lambda name: starts[name])
        within = int(found.max()) < starts[source] + tensors[source].numel()
        if not within or not torch.equal(numbers.as_strided(found.shape, steps, first), found):
            raise RolloutError(f"the tensor {saved} of a checkpoint is not a part of one of this model's tensors")
        views[saved] = tensors[source].as_strided(found.shape, steps, first - starts[source])
    return views


@torch.no_grad()
def load_weights(places: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copy each tensor to its place and yield it; nothing is copied unless the result is iterated over."""
    for name, tensor in weights:
        if name not in places:
            raise RolloutError(f"weights came for {name}, which this network does not have")
        places[name].copy_(tensor)
        yield name, tensor


@torch.no_grad()
def plain_copy(network: Network) -> Network:
    """Return an independent network with the same outputs, without adapters and quantisation."""
    decoder: Any = network.decoder
    if network.model is decoder:
        return copy.deepcopy(network)
    config = copy.deepcopy(decoder.config)
    vars(config).pop("quantization_config", None)
    model = type(decoder)._from_config(
        config, dtype=config.dtype, attn_implementation=decoder.config._attn_implementation
    )
    model.generation_config = copy.deepcopy(decoder.generation_config)
    model._weight_conversions = decoder._weight_conversions  # so that checkpoint names are the original's
    made = Network(model.to(decoder.device), self_test=network.self_test).requires_grad_(False)
    made.layout = network.layout
    for _ in load_weights(checkpoint_places(made), checkpoint_weights(network)):
        pass
    return made
