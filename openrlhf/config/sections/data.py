"""Flags for datasets, their fields, and templates.

`split_names` splits the flags that hold a comma-separated list; `openrlhf.data` loads the datasets.
"""

import json
from dataclasses import dataclass

from openrlhf.config.flags import FRACTION_OR_COUNT, NOT_NEGATIVE, POSITIVE, flag


def split_names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated flag into its items."""
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())


INPUT_HELP = "Field with the prompt: text or messages; commas join the texts of several, as in instruction,input."


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Evaluation data"""

    eval_dataset: str | None = flag(None, "Comma-separated datasets to evaluate on.", essential=True)
    eval_size: float | None = flag(
        None,
        "Hold out this much of the training data to evaluate on: a fraction such as 0.05, or a number of rows.",
        FRACTION_OR_COUNT,
        essential=True,
    )
    eval_split: str = flag("train", "Split of the evaluation datasets.", needs="eval_dataset")
    eval_revision: str | None = flag(
        None, "Comma-separated revisions, one for each hub name in --eval_dataset.", needs="eval_dataset"
    )

    @property
    def evaluates(self) -> bool:
        """Return whether there is evaluation data."""
        return self.eval_dataset is not None or self.eval_size is not None


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Data"""

    dataset: str | None = flag(
        None,
        "Comma-separated files (json, jsonl, csv, parquet, arrow), folders or hub names; name@dir selects a subfolder.",
        required="./data.jsonl",
        essential=True,
    )
    dataset_probs: str | None = flag(None, "Comma-separated mixing probabilities (default: concatenate the datasets).")
    dataset_split: str = flag("train", "Split of --dataset.")
    dataset_revision: str | None = flag(
        None, "Comma-separated commit hashes, tags or branches, one for each hub name in --dataset."
    )
    max_samples: int = flag(1_000_000, "Maximum rows per dataset, and in total after mixing.", POSITIVE, essential=True)


@dataclass(frozen=True, kw_only=True)
class DatasetFlags(EvaluationFlags, SourceFlags):
    """Data"""

    max_len: int = flag(2048, "Maximum tokens per sample; longer ones are truncated.", POSITIVE, essential=True)
    dataloader_num_workers: int = flag(0, "Accepted, but unused: rows are prepared before training.", NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Templates"""

    apply_chat_template: bool = flag(False, "Format messages with the tokenizer's chat template.", essential=True)
    tokenizer_chat_template: str | None = flag(None, "Chat template (Jinja text) to use instead of the tokenizer's.")
    input_template: str | None = flag(
        None, "Template with {} for the input, used if no chat template is applied.", essential=True
    )
    system_prompt: str | None = flag(None, "System message for conversations that do not start with one.")
    system_key: str | None = flag(
        None, "Field with a row's system message, for conversations that do not start with one (else --system_prompt)."
    )
    chat_template_kwargs: str | None = flag(
        None, 'Variables for the chat template, as a JSON object such as {"enable_thinking": false}.'
    )

    @property
    def template_kwargs(self) -> dict[str, object]:
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}


@dataclass(frozen=True, kw_only=True)
class ResponseFlags:
    """Fields"""

    input_key: str = flag("input", INPUT_HELP, essential=True)
    output_key: str | None = flag(None, "Field with the response.", essential=True)


@dataclass(frozen=True, kw_only=True)
class TeacherResponseFlags(ResponseFlags):
    """Fields"""

    pretrain_mode: bool = flag(False, "Train on every token of the plain text, without a template or EOS.")


@dataclass(frozen=True, kw_only=True)
class ConversationFlags(TeacherResponseFlags):
    """Fields"""

    pretrain_mode: bool = flag(
        False, "Continued pre-training: train on every token of the plain text, without a template or EOS."
    )
    multiturn: bool = flag(
        False, "Train on every assistant turn, not only the last (needs --apply_chat_template).", essential=True
    )


@dataclass(frozen=True, kw_only=True)
class LabelledResponseFlags(ResponseFlags):
    """Fields"""

    label_key: str = flag("label", "Field with the label: 1 if the response is desirable, else 0.", essential=True)


@dataclass(frozen=True, kw_only=True)
class PairFlags:
    """Fields"""

    prompt_key: str | None = flag(
        None, "Field with the prompt, as text or messages (default: chosen and rejected contain it).", essential=True
    )
    chosen_key: str = flag("chosen", "Field with the preferred response.", essential=True)
    rejected_key: str = flag("rejected", "Field with the rejected response.", essential=True)


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Fields"""

    input_key: str = flag(
        "input", "Field with the text; each step in it ends with --placeholder_token.", essential=True
    )
    label_key: str = flag("label", "Field with one label per step.", essential=True)
    placeholder_token: str | None = flag(
        None, "Token that ends each step; must be a single token of the vocabulary.", required="'ки'", essential=True
    )
    reward_tokens: tuple[str, ...] = flag(
        (), "Label tokens, with the positive one first; soft labels need exactly two.", essential=True
    )
