"""Export of a trained network as a folder that plain Transformers (for adapters: PEFT) can load.

Training backends call `save_model`, and gather sharded weights first. `merge.py` reads the head config that is saved
next to the adapters of a reward model.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf.models.forward import Network
from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.models.plain import Gather, gather_nothing

HEAD_CONFIG = "head_config.json"  # next to the adapters of a reward model
HEAD_KEYS = ("value_head_prefix", "mean", "std", "normalize_reward", "pad_token_id")


def raw_tensors(network: Network) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors to save, as they are in memory: the whole decoder without duplicates, or what is trained."""
    adapted = network.model is not network.decoder
    seen: set[int] = set()
    for name, tensor in network.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not adapted):
            seen.add(id(tensor))
            yield name, tensor


def saved_tensors(network: Network, gather: Gather = gather_nothing) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for `save_model`: the whole decoder without duplicates; under LoRA, what is trained.

    A tensor is valid until the next one is requested. If the network is sharded, every rank must iterate to the end.
    """
    for name, tensor in raw_tensors(network):
        with gather([tensor]) as unshard:
            yield name, unshard(tensor)


def save_model(network: Network, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save weights, config and generation config; under LoRA, only the adapters.

    A backend with sharded weights passes the gathered weights.
    """
    model: Any = network.model  # a Transformers or PEFT model; both have save_pretrained
    adapted = model is not network.decoder
    config = network.decoder.config.to_dict()
    prefix, own = f"{config.get('value_head_prefix', SCALAR_HEAD)}.", f"{SCALAR_HEAD}."
    if prefix != own and not adapted:  # save the scalar head under the requested name
        weights = {
            prefix + name.removeprefix(own) if name.startswith(own) else name: tensor
            for name, tensor in (weights or model.state_dict()).items()
        }
    model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
    known = {name: config[name] for name in HEAD_KEYS if name in config}
    if adapted and "value_head_prefix" in known:
        # Save the config values that the merged reward model will need. The file is not called config.json, because
        # PEFT would then mistake the folder for a complete model.
        (folder / HEAD_CONFIG).write_text(json.dumps(known, indent=1), encoding="utf-8")
