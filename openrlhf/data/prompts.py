"""Prompts for reinforcement learning: load the dataset, render each row, and drop prompts that are too long.

`load_prompts` returns prompts in dataset order; the RL loop shuffles them. Each prompt keeps its
label and data source, which the reward function receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.rl import PromptFlags
from openrlhf.data.findings import check_texts, field_findings, first_rows, missing_labels
from openrlhf.data.messages import read_messages, read_text
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport
from openrlhf.data.row_cache import load_rows
from openrlhf.data.rows import EMPTY_PROMPT, Dropped, Loaded, TooLong, announce
from openrlhf.data.sources import hold_out, load_dataset_rows
from openrlhf.data.templates import TextFormat, open_format
from openrlhf.types import Prompt

DATASOURCE = "datasource"  # column by which evaluation metrics are grouped


def load_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Load the training and evaluation prompts, and print what is wrong with them."""
    train, evaluation = read_prompts(config, tokenizer)
    return announce(train).rows, [] if evaluation is None else announce(evaluation).rows


def read_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Loaded[Prompt], Loaded[Prompt] | None]:
    """Load the prompts to train on and, with --eval_dataset or --eval_size, those to evaluate on.

    The rows of --prompt_data are limited to --max_samples, mixed by --prompt_data_probs and then divided.
    """
    flags, seed = config.prompts, config.batches.seed
    records = load_dataset_rows(
        str(flags.prompt_data),
        split=flags.prompt_split,
        probs=flags.prompt_data_probs,
        max_samples=flags.max_samples,
        seed=seed,
        revisions=flags.dataset_revision,
        loading=config.model,
    )
    records, evaluation = hold_out(records, flags.eval_size, seed)
    if flags.eval_dataset is not None:
        evaluation = load_dataset_rows(
            flags.eval_dataset,
            split=flags.eval_split,
            max_samples=flags.max_samples,
            revisions=flags.eval_revision,
            loading=config.model,
        )
    train = make_prompts(records, config, tokenizer)
    return train, None if evaluation is None else make_prompts(evaluation, config, tokenizer)


def make_prompts(records: Records, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Loaded[Prompt]:
    """Make the prompts; check their labels, unless all rewards come from reward models, which need none."""
    loaded = prompt_rows(records, tokenizer, config.prompts, config.template, prompt_budget(config))
    if config.rewards.agent_func_path or not config.rewards.scored_by_models:
        loaded.report.add(missing_labels(first_rows(records), config.prompts.label_key))
    return loaded


def prompt_budget(config: RLConfig) -> Budget:
    """Return --prompt_max_len or, with --max_len, the tokens that the longest response (at least one) leaves."""
    rollout = config.rollout
    if rollout.max_len is None:
        return Budget(rollout.prompt_max_len)
    tokens = rollout.max_len - (rollout.response_length or 1)
    return Budget(tokens, "--max_len", rollout.max_len - tokens)


def prompt_rows(
    records: Records, tokenizer: PreTrainedTokenizerBase, flags: PromptFlags, template: TemplateFlags, budget: Budget
) -> Loaded[Prompt]:
    """Make a Prompt from each row that fits the budget, numbered from 0 without gaps."""
    form = open_format(tokenizer, template)
    report = DataReport(records.name, budget)
    report.add(*field_findings(first_rows(records), (flags.input_key,), template))
    rows = load_rows(records, PromptReader(form, flags.input_key, flags.label_key, budget), report)
    return Loaded(rows, check_texts(report, tokenizer))


@dataclass(frozen=True)
class PromptReader:
    """Reader of prompts, each with its label and data source."""

    kind: ClassVar[type] = Prompt
    form: TextFormat
    input_key: str
    label_key: str | None
    budget: Budget

    def make(self, record: Record, report: DataReport) -> list[Prompt]:
        text = prompt_text(record, self.input_key, self.form)
        ids: Sequence[int] = self.form.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Dropped(EMPTY_PROMPT)
        label = "" if self.label_key is None else record.value(self.label_key, "--label_key")
        source = str(record.row.get(DATASOURCE, "default"))
        if len(ids) > self.budget.tokens:
            raise TooLong(f"longer than {self.budget}", tokens=len(ids))
        index = len(report.lengths)  # prompts that were kept before this one
        report.keep((text, len(ids)))
        return [Prompt(index=index, text=text, input_ids=tuple(ids), label=label, datasource=source)]


def prompt_text(record: Record, input_key: str, form: TextFormat) -> str:
    """Return the prompt as text, rendered with the chat template or the input template."""
    chat = form.chat
    if chat is None:
        return form.fill(read_text(record, input_key, "--input_key"))
    messages = read_messages(record, input_key, "--input_key", speaker="user")
    return chat.render(chat.conversation(record, messages), prompt=True).text
