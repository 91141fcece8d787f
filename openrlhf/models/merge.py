"""Merge a LoRA adapter into the weights that it was trained on, in fp32 on the CPU.

`inference/merge.py` calls `merge_adapter` and saves the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config.checks.paths import is_here, split_revision
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.errors import ConfigError, counted
from openrlhf.models.agreement import FAILURES
from openrlhf.models.export import HEAD_CONFIG, HEAD_KEYS
from openrlhf.models.heads import SCALAR_HEAD, add_missing_embeddings
from openrlhf.models.load import load_causal_lm, load_scalar_model, load_tokenizer
from openrlhf.monitor import say

AdaptedModel: TypeAlias = Any  # a PeftModel around a LoRA model, whose type stub lacks `merge_and_unload`
CPU = torch.device("cpu")
FULL = LoadingFlags(param_dtype="fp32")  # so that weights are rounded only once, to the requested dtype
TASKS = {"SEQ_CLS": True, "CAUSAL_LM": False}  # task type of an adapter -> whether it belongs to a reward model


def merge_adapter(
    base: str, adapter: Path, *, is_rm: bool, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the base with the adapter merged into its weights, and the tokenizer that the adapter was trained with.

    The base is loaded unquantised, even if the adapter was trained on a 4-bit base.
    """
    if not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"--lora_path {adapter}: expected a local folder with an adapter_config.json, found none")
    settings = adapter_settings(adapter)
    check_kind(adapter, str(settings.get("task_type")), is_rm=is_rm)
    base = choose_revision(base, adapter, settings)
    tokenizer = load_tokenizer(str(adapter) if (adapter / "tokenizer_config.json").is_file() else base, FULL)
    # Besides weights, the adapter folder of a reward model stores the name of its head and statistics of its scores.
    path = adapter / HEAD_CONFIG
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    head = {name: saved[name] for name in HEAD_KEYS if name in saved}
    if is_rm:  # the weights of the scalar head come with the adapter
        prefix = head.get("value_head_prefix", SCALAR_HEAD)
        model = load_scalar_model(base, FULL, device=CPU, packing=False, head_prefix=prefix, new_head=True)
    else:
        model = load_causal_lm(base, FULL, device=CPU, packing=False)
    add_missing_embeddings(model, tokenizer)  # training may have added a padding token
    merged = attach_adapter(model, adapter, base).merge_and_unload()
    merged.config.update(head)
    return merged.to(dtype), tokenizer


def adapter_settings(adapter: Path) -> dict[str, object]:
    """Return the content of an adapter's adapter_config.json; raise ConfigError if it is not an object."""
    try:
        found = parse_json((adapter / "adapter_config.json").read_bytes())
    except (OSError, InvalidJSON) as error:
        raise ConfigError(f"{adapter}/adapter_config.json cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{adapter}/adapter_config.json is not a JSON object")
    return found


def check_kind(adapter: Path, task: str, *, is_rm: bool) -> None:
    """Reject an adapter whose kind does not match --is_rm."""
    if task not in TASKS or TASKS[task] == is_rm:
        return
    if is_rm:
        raise ConfigError(
            f"--is_rm is given, but {adapter} is the adapter of a language model", try_this="without --is_rm"
        )
    raise ConfigError(f"{adapter} is the adapter of a reward model", try_this="--is_rm")


def choose_revision(base: str, adapter: Path, settings: Mapping[str, object]) -> str:
    """Append the commit that the adapter was trained on to the base's hub name, unless a revision is given.

    Print a line if the adapter was trained on a model with another name, which may have other weights.
    """
    trained, commit = str(settings.get("base_model_name_or_path") or ""), settings.get("revision")
    given = split_revision(base)[0]
    if trained and trained != given and Path(trained).expanduser().resolve() != Path(given).expanduser().resolve():
        say(
            f"{adapter} was trained on {trained}, and is merged into {given}: the result is right only if both have the"
            " same weights"
        )
    if is_here(base) or "@" in base or not commit or trained != base:
        return base
    say(f"merging into {base}@{commit}, the revision that {adapter} was trained on")
    return f"{base}@{commit}"


def attach_adapter(model: PreTrainedModel, adapter: Path, base: str) -> AdaptedModel:
    """Return the model with the adapter attached; every tensor of the adapter must match a tensor of the model."""
    from peft import PeftModel, get_peft_model_state_dict

    misfit = f"{adapter} does not fit {base}: expected the model that the adapter was trained on."
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter))
    except (*FAILURES, re.error) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"{misfit} {lines[min(1, len(lines) - 1)]}" if lines else misfit) from None
    weights = adapter / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigError(f"{adapter} contains no adapter_model.safetensors")
    with safe_open(weights, framework="pt") as file:
        saved = set(file.keys())
    places = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    odd = {name for name in saved ^ places if "embed" not in name}  # the adapter's file may contain resized embeddings
    if odd:
        raise ConfigError(f"{misfit} No counterpart for {counted(len(odd), 'tensor')}, such as {min(odd)}")
    return adapted
