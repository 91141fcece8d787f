"""Flags about data: datasets, their fields, and templates."""

import json
from dataclasses import dataclass
from typing import Any

from openrlhf.config.flags import flag


def split_names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated flag into its items."""
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Evaluation data"""

    eval_dataset: str | None = flag(None, "comma list of datasets to evaluate on")
    eval_split: str = flag("train", "split of the evaluation datasets")


@dataclass(frozen=True, kw_only=True)
class DatasetFlags(EvaluationFlags):
    """Data"""

    dataset: str | None = flag(
        None, "comma list of files (json, jsonl, csv, parquet, arrow), folders or hub names; name@dir"
    )
    dataset_probs: str | None = flag(None, "comma list of mixing probabilities; none concatenates")
    dataset_split: str = flag("train", "split of the training datasets")
    max_samples: int = flag(1_000_000, "rows taken of each dataset, and again after mixing")
    max_len: int = flag(2048, "tokens per sample; longer ones are cut")
    dataloader_num_workers: int = flag(0, "accepted; rows are prepared before training starts")


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Templates"""

    apply_chat_template: bool = flag(False, "format messages with the tokenizer's chat template")
    tokenizer_chat_template: str | None = flag(None, "a chat template (Jinja text) in place of the tokenizer's")
    input_template: str | None = flag(None, "template with {} for the input, used without a chat template")
    system_prompt: str | None = flag(None, "system message put before conversations that have none")
    chat_template_kwargs: str | None = flag(
        None, 'JSON passed to the chat template, such as {"enable_thinking": false}'
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}


@dataclass(frozen=True, kw_only=True)
class ResponseFlags:
    """Fields"""

    input_key: str = flag("input", "field with the prompt: text or a message list")
    output_key: str | None = flag(None, "field with the response")


@dataclass(frozen=True, kw_only=True)
class ConversationFlags(ResponseFlags):
    """Fields"""

    pretrain_mode: bool = flag(False, "continued pre-training: loss on every token, no template, no EOS")
    multiturn: bool = flag(False, "loss on every assistant turn (needs --apply_chat_template)")


@dataclass(frozen=True, kw_only=True)
class TeacherResponseFlags(ResponseFlags):
    """Fields"""

    pretrain_mode: bool = flag(False, "loss on every token, no template, no EOS")


@dataclass(frozen=True, kw_only=True)
class LabelledResponseFlags(ResponseFlags):
    """Fields"""

    label_key: str = flag("label", "field with the label: 1 desirable, 0 not")


@dataclass(frozen=True, kw_only=True)
class PairFlags:
    """Fields"""

    prompt_key: str | None = flag(None, "field with the prompt, where chosen and rejected do not hold it")
    chosen_key: str = flag("chosen", "field with the preferred response")
    rejected_key: str = flag("rejected", "field with the other response")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Fields"""

    input_key: str = flag("input", "field with the text whose steps end in the placeholder")
    label_key: str = flag("label", "field with one label per step")
    placeholder_token: str | None = flag(None, "token that ends a step; one token of the vocabulary")
    reward_tokens: tuple[str, ...] = flag((), "label tokens, the positive one first; for soft labels exactly two")
