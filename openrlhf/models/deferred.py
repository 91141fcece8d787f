"""Models whose weights are read later, layer by layer, so that no process holds a whole model.

`load_shell` builds a model whose parameters have shapes but almost no memory: each is one number that is expanded to
the full shape. Adapters can be added to it as to any model. The backend that shards the model then calls
`WeightFiles.fill` for the parameters of each layer, right before it keeps a part of them:

    load_shell  ->  model without weights, WeightFiles  ->  for each layer: fill, shard

Tensors are mapped from files, so only the rows that a process keeps take memory. A tensor that Transformers joins while
loading, such as the experts of a layer, is put together in memory first (`checkpoint_parts.py`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from openrlhf.errors import BackendError, counted
from openrlhf.models.checkpoint_parts import CheckpointPart, ScatteredTensorError, checkpoint_parts
from openrlhf.models.source import ModelSource

ATTRIBUTE = "deferred_weights"  # set on models that `load_shell` returns
Loaded: TypeAlias = tuple[PreTrainedModel, dict[str, Any]]  # a model, and the loading report of Transformers


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights, and the parameters that have not been filled from them yet."""

    files: dict[str, Path]  # file of each tensor, by its name in the file
    names: dict[nn.Parameter, str]  # names in the model
    parts: dict[str, list[CheckpointPart]]  # parts of each parameter, by its name in the model

    def fill(self, parameters: Iterable[nn.Parameter], *, copy: bool = False) -> None:
        """Fill parameters with their weights; parameters from elsewhere, such as adapters, already have theirs.

        Without `copy`, the weights may be mapped from a file, so keep them only until the file may change.
        """
        for parameter in parameters:
            if parameter in self.names:
                parts = self.parts[self.names.pop(parameter)]
                if len(parts) == 1 and parts[0].is_whole(parameter):
                    found = read_tensor(self.files[parts[0].name], parts[0].name)
                    parameter.data = found.to(parameter.dtype, copy=copy)
                else:
                    parameter.data = self._join(parts, parameter)

    def _join(self, parts: Sequence[CheckpointPart], parameter: nn.Parameter) -> Tensor:
        """Return a parameter's weights, put together from several tensors."""
        joined = torch.empty(parameter.shape, dtype=parameter.dtype)
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for part in parts:
                path = self.files[part.name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, "pt"))
                part.of(joined).copy_(opened[path].get_tensor(part.name))
        return joined

    def must_be_used_up(self) -> None:
        """Raise if a parameter was never filled, because the model was changed after loading."""
        if self.names:
            found = counted(len(self.names), "parameter")
            raise BackendError(f"{found} not loaded, such as {min(self.names.values())}")


def load_shell(load: Callable[..., Loaded], source: ModelSource) -> Loaded | None:
    """Return what `load` returns, but with a model without weights; None if that is not possible.

    Tensors missing in the files, such as those of a new head, are initialised as in Transformers. `load` is
    `from_pretrained` with all arguments; `source` holds those that locate the model.
    """
    files = weight_files(source)
    if files is None:
        return None
    model, report = load(device_map="meta")
    missing = set(report["missing_keys"])
    named = dict(model.named_parameters())  # each tied weight under one of its names
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    saved = {name: parameter for name, parameter in named.items() if name not in missing}
    try:
        parts = checkpoint_parts(model, {name: parameter.shape for name, parameter in saved.items()})
    except ScatteredTensorError:
        return None
    if not files.keys() >= set(buffers) - missing:
        return None
    if not _have_shapes(files, {part.name: part.shape for own in parts.values() for part in own}):
        return None
    empty = {parameter: _placeholder(parameter, is_new=name in missing) for name, parameter in named.items()}
    for module in model.modules():
        module._parameters.update(
            {name: empty[parameter] for name, parameter in module._parameters.items() if parameter is not None}
        )
    for name in sorted(missing):
        model._init_weights(model.get_submodule(name.rpartition(".")[0]))  # as Transformers does for a new head
    _make_buffers(model, files)
    vars(model)[ATTRIBUTE] = WeightFiles(files, {empty[parameter]: name for name, parameter in saved.items()}, parts)
    return model, report


def deferred_weights(model: nn.Module) -> WeightFiles:
    """Return the weights that a model still lacks; empty for a model that was loaded whole."""
    return vars(model).get(ATTRIBUTE) or WeightFiles({}, {}, {})


def weight_files(source: ModelSource) -> dict[str, Path] | None:
    """Return the safetensors file of each tensor of a model; None if the model has other files."""
    where = {name: value for name, value in source.items() if name in ("revision", "local_files_only")}

    def find(name: str) -> Path | None:
        found = cached_file(
            source["pretrained_model_name_or_path"], name, _raise_exceptions_for_missing_entries=False, **where
        )
        return None if found is None else Path(found)

    single = find(SAFE_WEIGHTS_NAME)
    if single is not None:
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return None
    parts: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    paths = {part: find(part) for part in set(parts.values())}
    return {name: path for name, part in parts.items() if (path := paths[part]) is not None}


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a file, mapped rather than read."""
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _have_shapes(files: dict[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether files have tensors of these shapes.

    Each file is opened once, because there may be many experts.
    """
    if not files.keys() >= shapes.keys():
        return False
    names: dict[Path, list[str]] = {}
    for name in shapes:
        names.setdefault(files[name], []).append(name)
    for path, own in names.items():
        with safe_open(path, "pt") as file:
            if any(tuple(file.get_slice(name).get_shape()) != shapes[name] for name in own):
                return False
    return True


def _placeholder(parameter: nn.Parameter, *, is_new: bool) -> nn.Parameter:
    """Return a parameter of the same shape that takes the memory of one number, unless it `is_new`.

    A parameter on the meta device would do, but adapters are created on the device of the weight that they adapt.
    """
    empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(empty.contiguous() if is_new else empty, requires_grad=parameter.requires_grad)


def _make_buffers(model: PreTrainedModel, files: dict[str, Path]) -> None:
    """Fill the buffers of a model on the meta device, from its files or as the model's class computes them."""
    from accelerate import init_empty_weights

    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        computed: Any = type(model)(copy.deepcopy(model.config))
    for name, _ in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        value = read_tensor(files[name], name).clone() if name in files else computed.get_buffer(name)
        model.get_submodule(owner)._buffers[attribute] = value
