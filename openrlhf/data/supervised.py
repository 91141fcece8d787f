"""Training and evaluation rows of the supervised commands.

`training.supervised` calls `load_data`, which also prints what a user should know about the rows. `openrlhf preview`
and a dry run call `read_datasets`. `read_rows` defines which kind of rows each command trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openrlhf.config import commands
from openrlhf.config.commands import SupervisedConfig
from openrlhf.data.collate import Row
from openrlhf.data.preference import labelled_rows, preference_rows
from openrlhf.data.preview_text import describe_row
from openrlhf.data.process import step_rows
from openrlhf.data.records import Records
from openrlhf.data.rows import Loaded, announce
from openrlhf.data.sft import sft_rows
from openrlhf.data.sources import hold_out, load_dataset, load_dataset_rows
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
    """Load the training and evaluation rows, and print what a user should know about them.

    A reward model without evaluation data is evaluated on its first training rows, for the mean and std of its scores.
    """
    train, evaluation = read_datasets(config, tokenizer)
    show_data(config, train, evaluation, tokenizer)
    if evaluation is None:
        scored = train.rows[: max(SCORED_ROWS, len(train.rows) // 100)] if isinstance(config, commands.RMConfig) else []
        if scored:
            first = counted(len(scored), "training row")
            say(f"no --eval_dataset or --eval_size: the mean and std of scores are computed on the first {first}")
        return SupervisedData(train.rows, scored, train.soft_labels)
    if evaluation.soft_labels != train.soft_labels:
        kinds = "probabilities", "tokens"
        raise DataError(
            f"{train.report.name} labels steps by {kinds[not train.soft_labels]},"
            f" but {evaluation.report.name} by {kinds[not evaluation.soft_labels]}"
        )
    return SupervisedData(train.rows, evaluation.rows, train.soft_labels)


def show_data(
    config: SupervisedConfig, train: Loaded[Row], evaluation: Loaded[Row] | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print the first training row, and what looks wrong with the rows."""
    announce(train)
    say(describe_row(train.rows[0], tokenizer, train.label_text))
    if evaluation is not None:
        announce(evaluation)


def read_datasets(
    config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase, eval_samples: int | None = None
) -> tuple[Loaded[Row], Loaded[Row] | None]:
    """Load the rows to train on and, with --eval_dataset or --eval_size, those to evaluate on.

    The rows of --dataset are limited to --max_samples, mixed by --dataset_probs and then divided; `eval_samples` limits
    those of --eval_dataset.
    """
    data, seed = config.data, config.batches.seed
    records, evaluation = hold_out(load_dataset(data, seed=seed, loading=config.model), data.eval_size, seed)
    if data.eval_dataset is not None:
        evaluation = load_dataset_rows(
            data.eval_dataset,
            split=data.eval_split,
            max_samples=eval_samples,
            revisions=data.eval_revision,
            loading=config.model,
        )
    train = read_rows(config, records, tokenizer)
    return train, None if evaluation is None else read_rows(config, evaluation, tokenizer)


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
