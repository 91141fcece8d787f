"""Freeze the modules of a model that training on text cannot or must not change.

Multimodal models are trained on text only, so no gradient reaches their vision or audio encoders and projectors. The
indexer of sparse attention selects tokens by top-k, which has no gradient. Some families freeze parameters themselves
(sinusoids, the biases by which a router balances its experts), but Transformers does not keep them frozen on loading.
All of these must be frozen; otherwise the optimizer would allocate state for them, and the audit would stop the run
because they do not change.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.monitor import say

INDEXER = "indexer"  # name of the module in sparse-attention families


def freeze_unused(model: PreTrainedModel) -> list[str]:
    """Freeze the modules that training on text does not update, report their kinds, and return their names."""
    with torch.device("meta"):
        bare = type(model)(copy.deepcopy(model.config))
    for name, parameter in bare.named_parameters():
        if not parameter.requires_grad:  # the model's class freezes it, but loading undoes that
            model.get_parameter(name).requires_grad_(False)
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == INDEXER]
    if model.config.get_text_config() is not model.config:  # a multimodal model: other encoders next to a text decoder
        heads = (model.get_output_embeddings(), model._modules.get(SCALAR_HEAD))
        text = {model.get_decoder(), *(head for head in heads if head is not None)}
        names = _beside_decoder(model, text) + names
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    if names:
        kinds = sorted({name.rpartition(".")[2] for name in names})
        say(f"{type(model).__name__}: training on text does not update {', '.join(kinds)}, so these modules are frozen")
    return names


def _beside_decoder(module: nn.Module, text: set[nn.Module], prefix: str = "") -> list[str]:
    """Return the names of the outermost modules with parameters that contain no text module (decoder or head)."""
    names: list[str] = []
    for name, child in module.named_children():
        if child in text or next(child.parameters(), None) is None:
            continue
        if text.isdisjoint(child.modules()):
            names.append(prefix + name)
        else:
            names += _beside_decoder(child, text, f"{prefix}{name}.")
    return names
