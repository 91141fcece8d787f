"""The model card of a merged or converted model, with the contents of its source's card.

Metadata and the section on training come from the source; the example is written again, since the model is loaded
differently. If the source's card is not ours, only its metadata is carried over.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from openrlhf.config.checks.paths import is_here
from openrlhf.models.heads import SCALAR_HEAD
from openrlhf.training.card_example import Example, Kind
from openrlhf.training.card_file import TAG, is_ours
from openrlhf.training.model_card import (
    PROCESS_REWARD_TAG,
    TRAINING_SECTION,
    base_metadata,
    fill_card,
    read_card,
)
from openrlhf.training.prompt_format import PromptFormat


def trained_format(source: str) -> PromptFormat | None:
    """Return the prompt format in the card of a model; None without such a card."""
    card = read_card(source)
    return PromptFormat.from_metadata(card.data.get("prompt_format")) if card else None


def merged_card(folder: Path, source: str, base: str | None, model: PreTrainedModel) -> ModelCard:
    """Return the card of a full model that was made from a model or adapter, `source`, and its base."""
    kind, head = kind_of_model(source, model), model.config.to_dict().get("value_head_prefix", SCALAR_HEAD)
    metadata = inherited_metadata(source, base)
    metadata.library_name = "transformers"
    metadata.pipeline_tag = "text-classification" if kind.scores else "text-generation"
    prompt = trained_format(source)
    example = Example(str(folder), kind, prompt or PromptFormat(), head=head)
    merged = f", merged from the adapter `{source}` into `{base}`" if base else f", made from `{source}`"
    return fill_card(
        metadata,
        title=folder.name,
        summary=f"This is a {kind.value}{merged} with OpenRLHF.",
        example=example if kind is not Kind.PROCESS_REWARD else None,
        prompt=prompt if kind is not Kind.PROCESS_REWARD else None,
        training=training_part(source),
    )


def kind_of_model(source: str, model: PreTrainedModel) -> Kind:
    """Return the kind of a model; a process reward model is a language model, so only its card identifies it."""
    if not hasattr(model, "lm_head") and hasattr(model, SCALAR_HEAD):
        return Kind.REWARD
    card = read_card(source)
    tags = (card.data.get("tags") or []) if card else []
    return Kind.PROCESS_REWARD if PROCESS_REWARD_TAG in tags else Kind.LANGUAGE


def gguf_card(folder: Path, source: str, base: str | None, file: str, weights: str) -> ModelCard:
    """Return the card of a GGUF file with its Modelfile."""
    metadata = inherited_metadata(source, base)
    metadata.library_name = "gguf"
    metadata.pipeline_tag = "text-generation"
    metadata.tags = [*(metadata.tags or []), "gguf"]
    return fill_card(
        metadata,
        title=folder.name,
        summary=f"This is `{source}` as a GGUF file with weights of type {weights}, written by OpenRLHF.",
        gguf={"name": folder.name.lower().replace(" ", "-"), "file": file},
        prompt=trained_format(source),
        training=training_part(source),
    )


def inherited_metadata(source: str, base: str | None) -> ModelCardData:
    """Return the metadata of a source's card or, without one, what is known about its base."""
    card = read_card(source) if is_here(source) else None
    metadata = base_metadata(source if card or base is None else base)
    if card is None:
        metadata.tags = [TAG]
        return metadata
    known = card.data
    metadata.datasets = known.get("datasets")
    metadata.tags = [*dict.fromkeys([TAG, *(tag for tag in known.get("tags") or [] if tag != "lora")])]
    if (prompt := known.get("prompt_format")) is not None:  # an empty one means training on plain text
        metadata["prompt_format"] = prompt
    return metadata


def training_part(source: str) -> str:
    """Return our model card's text from the training section to its end, without the sections that are rewritten."""
    card = read_card(source) if is_here(source) else None
    if card is None or not is_ours(card):
        return ""
    _, found, text = card.text.partition(f"\n{TRAINING_SECTION}\n")
    for heading in ("License", "Versions"):
        text = text.partition(f"\n## {heading}\n")[0]
    return (found + text).strip()
