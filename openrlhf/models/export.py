"""Export of a trained network as a folder that plain Transformers (for adapters: PEFT) can load.

The training backends call it, with gathered weights if theirs are sharded; `merge.py` reads what it saves next to
adapters.
"""

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
    """Yield the weights for `save_model`: the decoder's tensors, each once; of an adapted model, the trained ones."""
    model: Any = network.model
    adapted = model is not network.decoder
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not adapted):
            seen.add(id(tensor))
            yield name, tensor.detach()


def save_model(network: Network, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save weights, config and generation config; under LoRA, only the adapters.

    A backend that shards its weights passes the gathered ones.
    """
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
    """Save what the config of a merged reward model needs about its scores, next to the adapters.

    It is not called config.json, because PEFT's own loaders would then take the folder for a complete model.
    """
    config = network.decoder.config.to_dict()
    known = {name: config[name] for name in HEAD_KEYS if name in config}
    if "value_head_prefix" in known:
        (folder / HEAD_CONFIG).write_text(json.dumps(known, indent=1), encoding="utf-8")


def _renamed(name: str, prefix: str) -> str:
    """Replace the name of the scalar head by `prefix`."""
    head = f"{SCALAR_HEAD}."
    return f"{prefix}.{name.removeprefix(head)}" if name.startswith(head) else name
