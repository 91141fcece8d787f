"""The preview command: show the data of a command as its model would see it, without loading the model.

`run` reads every dataset that the command's flags name, in the same way as the command itself, analyses the rows
(`data.preview`) and prints them to stdout.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.batch_table import Line
from openrlhf.config.commands import BatchInferenceConfig, KDConfig, RLConfig, SFTConfig, SupervisedConfig, Templated
from openrlhf.config.preview import PreviewFlags, ReadsData
from openrlhf.config.runtime import num_optimizer_steps, num_rollouts
from openrlhf.config.sections.data import EvaluationFlags, TemplateFlags
from openrlhf.data.answers import iteration_slice, read_answers
from openrlhf.data.preview import AnyRow, Preview, preview_data
from openrlhf.data.preview_text import render
from openrlhf.data.prompts import read_prompts
from openrlhf.data.rows import Loaded
from openrlhf.data.sources import load_dataset
from openrlhf.data.supervised import read_datasets
from openrlhf.inference.generate import generation_context, read_generation_prompts
from openrlhf.models.load import load_tokenizer
from openrlhf.training.order import Order


@dataclass(frozen=True)
class FlagData:
    """The rows of one dataset flag, and how many steps the command takes over them."""

    flag: str
    loaded: Loaded[AnyRow]
    steps: tuple[Line, ...] = ()


def run(config: ReadsData, flags: PreviewFlags) -> list[Preview]:
    """Print a preview of each dataset of the command, and return them; the config must already be checked."""
    disable_progress_bar()
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    previews: list[Preview] = []
    for data in read_data(config, tokenizer):
        preview = preview_data(data.flag, data.loaded, tokenizer, num_rows=flags.rows, template=template_of(config))
        text = render(preview, data.steps, longest=flags.row_chars, colour=colour)
        encoding = sys.stdout.encoding or "utf-8"  # may not support all characters of the data
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        previews.append(preview)
    return previews


def template_of(config: ReadsData) -> TemplateFlags | None:
    """Return the template flags of a command; None if it reads plain text or text that is already rendered."""
    if isinstance(config, SFTConfig | KDConfig) and config.fields.pretrain_mode:
        return None
    if isinstance(config, BatchInferenceConfig) and config.task.eval_task == "rm":
        return None
    return config.template if isinstance(config, Templated) else None


def read_data(config: ReadsData, tokenizer: PreTrainedTokenizerBase) -> list[FlagData]:
    """Read the datasets of a command's flags."""
    match config:
        case RLConfig():
            return read_rl(config, tokenizer)
        case BatchInferenceConfig():
            return [read_batch(config, tokenizer)]
        case SupervisedConfig():
            return read_supervised(config, tokenizer)


def read_supervised(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> list[FlagData]:
    """Read the training and evaluation rows of a supervised command."""
    (loaded, evaluation), batches = read_datasets(config, tokenizer), config.batches
    size, epochs = batches.train_batch_size, batches.max_epochs
    order = Order(len(loaded.rows), size, epochs, batches.seed, batches.max_steps)
    steps = (
        Line("steps per epoch", f"{order.steps_per_epoch:,}", f"{order.num_rows:,} / --train_batch_size {size}"),
        Line("steps", f"{order.total_steps:,}", f"--max_epochs {epochs}" + limit(batches.max_steps)),
    )
    found = [FlagData("dataset", loaded, steps)]
    if evaluation is not None:
        found.append(FlagData(evaluation_flag(config.data), evaluation))
    return found


def evaluation_flag(flags: EvaluationFlags) -> str:
    return "eval_dataset" if flags.eval_size is None else "eval_size"


def read_rl(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[FlagData]:
    """Read the training and evaluation prompts."""
    (loaded, evaluation), rollout = read_prompts(config, tokenizer), config.rollout
    once, prompts = len(loaded.rows), len(loaded.rows) * rollout.num_episodes
    batch, passes = rollout.rollout_batch_size, f"--num_episodes {rollout.num_episodes}"
    steps = (
        Line("rollouts per pass", f"{math.ceil(once / batch):,}", f"{once:,} / --rollout_batch_size {batch}"),
        Line("rollouts", f"{num_rollouts(config, prompts):,}", passes + limit(config.batches.max_steps)),
        Line("optimizer steps", f"{num_optimizer_steps(config, prompts):,}", "over all rollouts"),
    )
    found = [FlagData("prompt_data", loaded, steps)]
    if evaluation is not None:
        found.append(FlagData(evaluation_flag(config.prompts), evaluation))
    return found


def read_batch(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> FlagData:
    """Read the prompts to generate from, or the answers to score."""
    task = config.task
    records = load_dataset(config.data, seed=task.seed, loading=config.model)
    records, first = iteration_slice(records, task.iter, task.rollout_batch_size)
    if task.eval_task == "rm":
        return FlagData("dataset", read_answers(records, tokenizer, config))
    loaded = read_generation_prompts(config, tokenizer, records, first, generation_context(config))
    responses = Line("responses", f"{len(loaded.rows) * task.best_of_n:,}", f"--best_of_n {task.best_of_n}")
    return FlagData("dataset", loaded, (responses,))


def limit(max_steps: int | None) -> str:
    return "" if max_steps is None else f", --max_steps {max_steps}"
