"""Freezing of the parts of a model that training on text cannot or must not change.

A checkpoint with vision or audio is trained on text only, so no gradient reaches its other encoders and their
projectors. An indexer selects the tokens for attention by top-k, and a selection has no gradient. Some families freeze
parameters themselves (sinusoids, the biases by which a router balances its experts), but Transformers loses that on
loading. All of these are frozen: otherwise the optimizer would hold state for them, and the audit would stop the run
because they do not learn.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.monitor import say

INDEXER = "indexer"  # name of the module in sparse-attention families


def freeze_unused(model: PreTrainedModel) -> list[str]:
    """Freeze everything that text does not train; print which kinds of modules these are, and return their names."""
    with torch.device("meta"):
        bare = type(model)(copy.deepcopy(model.config))
    for name, parameter in bare.named_parameters():
        if not parameter.requires_grad:  # the model's class freezes it, but loading lost that
            model.get_parameter(name).requires_grad_(False)
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == INDEXER]
    if model.config.get_text_config() is not model.config:  # a composite model: encoders alongside a text decoder
        heads = (model.get_output_embeddings(), model._modules.get(SCALAR_HEAD))
        text = {model.get_decoder(), *(head for head in heads if head is not None)}
        names = _beside_decoder(model, text) + names
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    if names:
        kinds = sorted({name.rpartition(".")[2] for name in names})
        say(f"{type(model).__name__}: training on text does not reach {', '.join(kinds)}, so it stays frozen")
    return names


def _beside_decoder(module: nn.Module, text: set[nn.Module], prefix: str = "") -> list[str]:
    """Return the names of the largest modules that have parameters and contain no text module (decoder or head)."""
    names: list[str] = []
    for name, child in module.named_children():
        if child in text or next(child.parameters(), None) is None:
            continue
        if text.isdisjoint(child.modules()):
            names.append(prefix + name)
        else:
            names += _beside_decoder(child, text, f"{prefix}{name}.")
    return names
