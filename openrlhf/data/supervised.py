"""Training and evaluation rows of the supervised commands.

`training.supervised` calls `load_data`; a dry run calls `load_train` to read only the training rows. Both print what a
user should know about the rows; `read_train` and `read_evaluation` leave that to their caller, `openrlhf preview`.
`read_rows` defines which kind of rows each command trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from openrlhf.config import commands
from openrlhf.config.commands import SupervisedConfig
from openrlhf.data.collate import Row
from openrlhf.data.preference import labelled_rows, preference_rows
from openrlhf.data.preview import NUMBER, LabelText
from openrlhf.data.preview_text import describe_row
from openrlhf.data.process import label_text, step_rows
from openrlhf.data.records import Records
from openrlhf.data.rows import Loaded, announce
from openrlhf.data.sft import sft_rows
from openrlhf.data.sources import load_dataset, load_dataset_rows
from openrlhf.errors import ConfigError, DataError, counted
from openrlhf.monitor import say

SCORED_ROWS = 100  # minimum number of rows for a reliable mean and standard deviation of scores


@dataclass(frozen=True)
class SupervisedData:
    """Training rows and evaluation rows of a command, all of one kind."""

    train: Sequence[Row]
    evaluation: Sequence[Row]  # empty if no evaluation was requested
    soft_labels: bool = False  # see `Loaded`


def load_data(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> SupervisedData:
    """Load the training rows and the rows of --eval_dataset.

    A reward model without --eval_dataset is evaluated on its first training rows, for the mean and std of its scores.
    """
    data = config.data
    train = load_train(config, tokenizer)
    if data.eval_dataset is None:
        scored = train.rows[: max(SCORED_ROWS, len(train.rows) // 100)] if isinstance(config, commands.RMConfig) else []
        if scored:
            first = counted(len(scored), "training row")
            say(f"no --eval_dataset: the mean and std of scores are computed on the first {first}")
        return SupervisedData(train.rows, scored, train.soft_labels)
    evaluation = announce(read_evaluation(config, tokenizer))
    if evaluation.soft_labels != train.soft_labels:
        kinds = "probabilities", "tokens"
        raise DataError(
            f"{data.dataset} labels steps by {kinds[not train.soft_labels]},"
            f" but {data.eval_dataset} by {kinds[not evaluation.soft_labels]}"
        )
    return SupervisedData(train.rows, evaluation.rows, train.soft_labels)


def load_train(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded[Row]:
    """Load the training rows; print the first one, and what looks wrong with them."""
    loaded = announce(read_train(config, tokenizer))
    say(describe_row(loaded.rows[0], tokenizer, label_text_of(config, loaded, tokenizer)))
    return loaded


def label_text_of(config: SupervisedConfig, loaded: Loaded[Row], tokenizer: PreTrainedTokenizerBase) -> LabelText:
    """Return the function that names the labels of steps, which only process reward models have."""
    if not isinstance(config, commands.PRMConfig):
        return NUMBER
    return partial(label_text, tokenizer=tokenizer, fields=config.fields, soft=loaded.soft_labels)


def read_train(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded[Row]:
    """Load the rows of --dataset, limited to --max_samples and mixed by --dataset_probs."""
    records = load_dataset(config.data, seed=config.batches.seed, loading=config.model)
    return read_rows(config, records, tokenizer)


def read_evaluation(
    config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase, max_samples: int | None = None
) -> Loaded[Row]:
    """Load the rows of --eval_dataset."""
    data = config.data
    records = load_dataset_rows(
        str(data.eval_dataset),
        split=data.eval_split,
        max_samples=max_samples,
        revisions=data.eval_revision,
        loading=config.model,
    )
    return read_rows(config, records, tokenizer)


def read_rows(config: SupervisedConfig, records: Records, tokenizer: PreTrainedTokenizerBase) -> Loaded[Row]:
    """Convert records to the kind of rows that the command trains on."""
    max_len = config.data.max_len
    match config:
        case commands.SFTConfig(fields=fields, template=template) | commands.KDConfig(fields=fields, template=template):
            return sft_rows(records, tokenizer, fields, template, max_len)
        case commands.RMConfig(fields=fields, template=template):
            return preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=False)
        case commands.DPOConfig(fields=fields, template=template):
            return preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=True)
        case commands.KTOConfig(fields=fields, template=template):
            return labelled_rows(records, tokenizer, fields, template, max_len)
        case commands.PRMConfig(fields=fields):
            return step_rows(records, tokenizer, fields, max_len)
    raise ConfigError(f"{type(config).__name__} does not train on a dataset")
