"""Training and evaluation rows of the supervised commands.

`training.supervised` calls `load_data`; a dry run calls `load_train` to read only the training rows. `read_rows`
defines which kind of rows each command trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openrlhf.config import commands
from openrlhf.config.commands import SupervisedConfig
from openrlhf.data.collate import Row
from openrlhf.data.preference import labelled_rows, preference_rows
from openrlhf.data.process import step_rows
from openrlhf.data.records import Records
from openrlhf.data.rows import Loaded
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
    records = load_dataset_rows(
        data.eval_dataset, split=data.eval_split, revisions=data.eval_revision, loading=config.model
    )
    evaluation = read_rows(config, records, tokenizer)
    if evaluation.soft_labels != train.soft_labels:
        kinds = "probabilities", "tokens"
        raise DataError(
            f"{data.dataset} labels steps by {kinds[not train.soft_labels]},"
            f" but {data.eval_dataset} by {kinds[not evaluation.soft_labels]}"
        )
    return SupervisedData(train.rows, evaluation.rows, train.soft_labels)


def load_train(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Load the rows of --dataset, limited to --max_samples and mixed by --dataset_probs."""
    records = load_dataset(config.data, seed=config.batches.seed, loading=config.model)
    return read_rows(config, records, tokenizer)


def read_rows(config: SupervisedConfig, records: Records, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Convert records to the kind of rows that the command trains on."""
    max_len = config.data.max_len
    match config:
        case commands.SFTConfig(fields=fields, template=template) | commands.KDConfig(fields=fields, template=template):
            return Loaded(sft_rows(records, tokenizer, fields, template, max_len))
        case commands.RMConfig(fields=fields, template=template):
            return Loaded(preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=False))
        case commands.DPOConfig(fields=fields, template=template):
            return Loaded(preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=True))
        case commands.KTOConfig(fields=fields, template=template):
            return Loaded(labelled_rows(records, tokenizer, fields, template, max_len))
        case commands.PRMConfig(fields=fields):
            return step_rows(records, tokenizer, fields, max_len)
    raise ConfigError(f"{type(config).__name__} does not train on a dataset")
