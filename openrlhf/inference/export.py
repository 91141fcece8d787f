"""The export command: merge a model's adapter, convert the model to GGUF, and upload the result.

With --output_path, the model is loaded in fp32 on the CPU, adapters are merged into their base, and a new folder is
written: for Transformers or, with --gguf, for llama.cpp and Ollama. Without it, the folder of --pretrain is uploaded as
it is, which is also how an upload that failed after training is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.checks.paths import looks_local
from openrlhf.config.commands import ExportConfig
from openrlhf.config.sections.export import GGUFType
from openrlhf.errors import ConfigError
from openrlhf.inference.converted_card import gguf_card, merged_card, trained_format
from openrlhf.inference.gguf.families import family_of
from openrlhf.inference.gguf.modelfile import modelfile, starts_with_bos
from openrlhf.inference.gguf.verify import compare_logits, compare_tensors, reload_logits, sample_logits
from openrlhf.inference.gguf.write import GGUFPlan, check_exportable, write_gguf
from openrlhf.models.export import save_model
from openrlhf.models.forward import Network
from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.models.load import DTYPES, load_causal_lm, load_scalar_model, load_tokenizer, read_config
from openrlhf.models.merge import CPU, FULL, TASKS, adapter_settings, merge_adapter
from openrlhf.monitor import say
from openrlhf.training.atomic_folder import MARKERS, exporting, remove_leftovers
from openrlhf.training.card_example import Kind
from openrlhf.training.disk_space import show
from openrlhf.training.final_save import warn_of_model
from openrlhf.training.folder_lock import hold_folder
from openrlhf.training.hub import check_login, push_folder
from openrlhf.training.model_card import write_card
from openrlhf.training.processes import choose_device
from openrlhf.training.prompt_format import PromptFormat

MODEL, MODELFILE = "model.gguf", "Modelfile"


@dataclass(frozen=True)
class SourceModel:
    """The model to export, loaded on the CPU with its adapter merged."""

    name: str
    base: str | None  # base model, if the source is an adapter
    kind: Kind
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def run(config: ExportConfig) -> Path:
    """Export or upload a model and return its folder; the config must already be checked."""
    disable_progress_bar()
    check_login(config.hub)
    flags = config.export
    folder = Path(flags.output_path or str(flags.pretrain)).expanduser()
    if flags.output_path:
        with converting_to(folder, MARKERS if flags.gguf is None else (MODEL,)):
            if flags.gguf is None:
                dtype = config.model.param_dtype
                save_for_transformers(folder, load_source(str(flags.pretrain), DTYPES[dtype]), dtype)
            else:
                save_as_gguf(config, folder, flags.gguf)
    push_folder(folder, config.hub)
    return folder


@contextmanager
def converting_to(folder: Path, replaced: Sequence[str] = MARKERS) -> Iterator[None]:
    """Lock the output folder while a model is converted on the CPU, and delete leftovers of killed runs.

    Print a line if one of the files that will be `replaced` exists.
    """
    choose_device("cpu")
    with hold_folder(folder, "--output_path"):
        remove_leftovers(folder.parent, lambda name: name == folder.name)
        warn_of_model("output_path", folder, replaced)
        yield


@dataclass(frozen=True)
class AdapterBase:
    """The model that an adapter was trained on."""

    name: str
    is_rm: bool


def adapter_base(folder: str) -> AdapterBase | None:
    """Return the base of an adapter; None if the folder holds a model, or is a hub name."""
    path = Path(folder).expanduser()
    if not (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return None
    saved = adapter_settings(path)
    base = str(saved.get("base_model_name_or_path"))
    if looks_local(base) and not Path(base).expanduser().exists():
        raise ConfigError(
            f"--pretrain {folder} is an adapter of {base}, which does not exist",
            try_this=f"openrlhf lora_combiner --model_path BASE --lora_path {folder} --output_path MERGED",
        )
    return AdapterBase(base, TASKS.get(str(saved.get("task_type")), False))


def load_source(name: str, dtype: torch.dtype) -> SourceModel:
    """Load a model or, if the folder holds an adapter, its base with the adapter merged into it."""
    base = adapter_base(name)
    if base is not None:
        return merged_source(base.name, name, dtype, is_rm=base.is_rm)
    classes = read_config(name, FULL).architectures or []
    tokenizer = load_tokenizer(name, FULL)
    if any("SequenceClassification" in item for item in classes):
        model = load_scalar_model(name, FULL, device=CPU, packing=False, head_prefix=SCALAR_HEAD)
        return SourceModel(name, None, Kind.REWARD, moved(model, dtype), tokenizer)
    model = load_causal_lm(name, FULL, device=CPU, packing=False)
    return SourceModel(name, None, Kind.LANGUAGE, moved(model, dtype), tokenizer)


def merged_source(base: str, adapter: str, dtype: torch.dtype, *, is_rm: bool) -> SourceModel:
    """Load a base model, and merge an adapter into it."""
    model, tokenizer = merge_adapter(base, Path(adapter).expanduser(), is_rm=is_rm, dtype=dtype)
    return SourceModel(adapter, base, Kind.REWARD if is_rm else Kind.LANGUAGE, model, tokenizer)


def moved(model: Any, target: torch.dtype | str) -> PreTrainedModel:
    """Move a model to a dtype or device, in place; `to` of a Transformers model is not typed."""
    return model.to(target)


def save_for_transformers(folder: Path, source: SourceModel, dtype: str) -> None:
    """Write a full model; `dtype` is that of its weights."""
    with exporting(folder) as aside:
        save_model(Network(source.model), aside)
        source.tokenizer.save_pretrained(aside)
        write_card(aside, partial(merged_card, folder, source.name, source.base, source.model))
    say(f"saved {folder} in {dtype}")


def save_as_gguf(config: ExportConfig, folder: Path, weights: GGUFType) -> None:
    """Write model.gguf and a Modelfile, and compare the file with the model before the folder is published."""
    flags = config.export
    name = str(flags.pretrain)
    base = adapter_base(name)
    family_of(read_config(base.name if base else name, FULL))  # rejects most other models before their weights load
    source = load_source(name, torch.float32)
    if source.kind is not Kind.LANGUAGE:
        raise ConfigError(f"--gguf needs a language model, but {source.name} is a {source.kind.value}")
    family, vocabulary = check_exportable(source.model, source.tokenizer)
    prompt = prompt_format(config, source)
    own_template = prompt.chat_template if prompt else None
    plan = GGUFPlan(
        family,
        vocabulary,
        name=folder.name,
        weights=weights,
        chat_template=own_template or plain_template(source.tokenizer),
        add_bos=starts_with_bos(source.tokenizer, prompt),
    )
    text, complete = modelfile(MODEL, source.tokenizer, prompt or PromptFormat())
    with exporting(folder) as aside:
        path = aside / MODEL
        write_gguf(path, source.model, source.tokenizer, plan)
        (aside / MODELFILE).write_text(text, encoding="utf-8")
        write_card(aside, partial(gguf_card, folder, source.name, source.base, MODEL, weights))
        checked = check_file(path, source, plan, reload=not flags.skip_self_test)
        size = show(path.stat().st_size)
    if not complete:
        say(
            "the Modelfile has no TEMPLATE, because the chat template does more than put fixed texts around messages:"
            " llama.cpp and Ollama use the one in model.gguf"
        )
    say(f"saved {folder / MODEL} ({weights}, {size}): {checked}")


def prompt_format(config: ExportConfig, source: SourceModel) -> PromptFormat | None:
    """Return how the model is prompted: by the flag, as in training, or with its chat template if it has one."""
    if config.export.input_template is not None:
        return PromptFormat(input_template=config.export.input_template or None)
    trained = trained_format(source.name)
    if trained is not None:
        return trained
    return PromptFormat(chat=True) if plain_template(source.tokenizer) else None


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's chat template, or the default one if it has several."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def check_file(path: Path, source: SourceModel, plan: GGUFPlan, *, reload: bool) -> str:
    """Compare a written file with the model and describe the result; raise if they differ.

    The model is released before the file is loaded, so that memory holds one of them at a time.
    """
    difference = compare_tensors(path, source.model, plan.family, plan.weights)
    weights = f"weights differ by at most {difference:.2%}"
    if not reload:
        return weights
    expected = sample_logits(source.model, source.tokenizer)
    moved(source.model, "meta")
    found = reload_logits(path, source.model.config, source.tokenizer)
    return f"{weights}; reloaded, {compare_logits(expected, found, plan.weights)}"
