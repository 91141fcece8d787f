"""A trained network as a folder that plain Transformers (for adapters: PEFT) loads."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf.models.forward import Network
from openrlhf.models.heads import SCALAR_HEAD

HEAD_CONFIG = "head_config.json"
HEAD_KEYS = ("value_head_prefix", "mean", "std", "normalize_reward", "pad_token_id")


def saved_tensors(network: Network) -> Iterator[tuple[str, Tensor]]:
    """What `save_model` takes as weights: the decoder's tensors, each once, or what is trained of an adapted model."""
    model: Any = network.model
    adapted = model is not network.decoder
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not adapted):
            seen.add(id(tensor))
            yield name, tensor.detach()


def save_model(network: Network, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Weights (gathered ones where a backend shards them), config and generation config; adapters alone under LoRA."""
    model: Any = network.model
    kwargs: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    prefix = network.decoder.config.to_dict().get("value_head_prefix", SCALAR_HEAD)
    if prefix != SCALAR_HEAD and model is network.decoder:
        given = kwargs.get("state_dict") or model.state_dict()
        kwargs["state_dict"] = {_renamed(name, prefix): tensor for name, tensor in given.items()}
    model.save_pretrained(folder, **kwargs)
    if model is not network.decoder:
        save_head_config(network, folder)


def save_head_config(network: Network, folder: Path) -> None:
    """Beside a reward model's adapters: what the merged model's config must know of its scores.

    Not as config.json, which would make PEFT's own loaders take the folder for a whole model.
    """
    config = network.decoder.config.to_dict()
    known = {name: config[name] for name in HEAD_KEYS if name in config}
    if "value_head_prefix" in known:
        (folder / HEAD_CONFIG).write_text(json.dumps(known, indent=1))


def _renamed(name: str, prefix: str) -> str:
    head = f"{SCALAR_HEAD}."
    return f"{prefix}.{name.removeprefix(head)}" if name.startswith(head) else name
