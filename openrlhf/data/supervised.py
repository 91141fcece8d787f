"""Training and evaluation rows of the supervised commands, from their config. The entry point is `load_data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrlhf.config.commands import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.config.sections.data import ConversationFlags
from openrlhf.data.preference import preference_rows
from openrlhf.data.process import step_rows
from openrlhf.data.sft import sft_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.data.unpaired import labelled_rows
from openrlhf.errors import ConfigError, DataError
from openrlhf.monitor import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.data.collate import Row
    from openrlhf.data.records import Records

SCORED_ROWS = 100  # minimum, if there are that many: mean and spread of fewer scores say little


@dataclass(frozen=True)
class Loaded:
    """Rows of one kind; `soft_labels` is true if a process reward model's labels are probabilities."""

    rows: Sequence[Row]
    soft_labels: bool = False


@dataclass(frozen=True)
class SupervisedData:
    """Training rows and evaluation rows of a command; the latter are empty if no evaluation was requested."""

    train: Sequence[Row]
    evaluation: Sequence[Row]
    soft_labels: bool = False


def load_data(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> SupervisedData:
    """Load training and evaluation rows.

    A reward model without --eval_dataset is evaluated on its first training rows, to measure mean and spread of scores.
    """
    train = load_train(config, tokenizer)
    evaluation = load_eval(config, tokenizer)
    if evaluation is None:
        held = train.rows[: max(SCORED_ROWS, len(train.rows) // 100)] if isinstance(config, RMConfig) else []
        if held:
            say(f"no --eval_dataset: the first {len(held)} training rows serve for the mean and spread of scores")
        return SupervisedData(train.rows, held, train.soft_labels)
    if evaluation.soft_labels != train.soft_labels:
        kinds = "probabilities", "tokens"
        raise DataError(
            f"{config.data.dataset} labels steps by {kinds[not train.soft_labels]},"
            f" but {config.data.eval_dataset} by {kinds[not evaluation.soft_labels]}"
        )
    return SupervisedData(train.rows, evaluation.rows, train.soft_labels)


def load_train(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Load the rows of --dataset, capped and mixed as the flags say."""
    data = config.data
    records = load_dataset_rows(
        str(data.dataset),
        split=data.dataset_split,
        probs=None if data.dataset_probs is None else [float(item) for item in data.dataset_probs.split(",")],
        max_samples=data.max_samples,
        seed=config.batches.seed,
        use_ms=config.model.use_ms,
        trust_remote_code=config.model.trust_remote_code,
    )
    return read_rows(config, records, tokenizer)


def load_eval(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded | None:
    """Load all rows of --eval_dataset, one dataset after the other; None without the flag."""
    data = config.data
    if data.eval_dataset is None:
        return None
    records = load_dataset_rows(
        data.eval_dataset,
        split=data.eval_split,
        use_ms=config.model.use_ms,
        trust_remote_code=config.model.trust_remote_code,
    )
    return read_rows(config, records, tokenizer)


def read_rows(config: SupervisedConfig, records: Records, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Convert records to the kind of rows that the command trains on."""
    max_len = config.data.max_len
    match config:
        case SFTConfig(fields=fields, template=template):
            return Loaded(sft_rows(records, tokenizer, fields, template, max_len))
        case KDConfig(fields=fields, template=template):
            conversations = ConversationFlags(
                input_key=fields.input_key, output_key=fields.output_key, pretrain_mode=fields.pretrain_mode
            )
            return Loaded(sft_rows(records, tokenizer, conversations, template, max_len))
        case RMConfig(fields=fields, template=template):
            return Loaded(preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=False))
        case DPOConfig(fields=fields, template=template):
            return Loaded(preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=True))
        case KTOConfig(fields=fields, template=template):
            return Loaded(labelled_rows(records, tokenizer, fields, template, max_len))
        case PRMConfig(fields=fields):
            steps = step_rows(records, tokenizer, fields, max_len)
            return Loaded(steps.rows, soft_labels=steps.soft)
    raise ConfigError(f"{type(config).__name__} does not train on a dataset")
