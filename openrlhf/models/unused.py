"""Parts of a model that training on text cannot change, or must not.

A checkpoint with vision or audio is trained on text alone here, so no gradient reaches its other encoders and their
projectors. An indexer chooses by top-k which tokens attention looks at, and a choice has no gradient. Some families
freeze parameters themselves (the biases by which a router balances its experts, sinusoids), but Transformers forgets
that as it loads them. All of these are frozen: otherwise the optimizer would hold state for them, and the audit would
stop the run because they do not learn.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.monitor import say

INDEXER = "indexer"  # what sparse-attention families call the module


def freeze_unused(model: PreTrainedModel) -> list[str]:
    """Freeze what text does not train, say which modules that are, and return their names."""
    for name in frozen_by_design(model):
        model.get_parameter(name).requires_grad_(False)
    names = unused_modules(model)
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    if names:
        kinds = sorted({name.rpartition(".")[2] for name in names})
        say(f"{type(model).__name__}: training on text does not reach {', '.join(kinds)}, so it stays frozen")
    return names


def frozen_by_design(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that the model's class makes without a gradient."""
    with torch.device("meta"):
        bare = type(model)(copy.deepcopy(model.config))
    return [name for name, parameter in bare.named_parameters() if not parameter.requires_grad]


def unused_modules(model: PreTrainedModel) -> list[str]:
    """Names of modules, none of them within another."""
    is_composite = model.config.get_text_config() is not model.config
    encoders = _beside_decoder(model, _text_modules(model)) if is_composite else []
    return encoders + [name for name, _ in model.named_modules() if name.rpartition(".")[2] == INDEXER]


def _text_modules(model: PreTrainedModel) -> set[nn.Module]:
    """The text decoder and the head, whichever it is."""
    heads = (model.get_output_embeddings(), model._modules.get(SCALAR_HEAD))
    return {model.get_decoder(), *(head for head in heads if head is not None)}


def _beside_decoder(module: nn.Module, text: set[nn.Module], prefix: str = "") -> list[str]:
    """The largest modules that hold parameters and nothing of the text's modules."""
    names: list[str] = []
    for name, child in module.named_children():
        if child in text or next(child.parameters(), None) is None:
            continue
        if text.isdisjoint(child.modules()):
            names.append(prefix + name)
        else:
            names += _beside_decoder(child, text, f"{prefix}{name}.")
    return names
