"""Prompts for reinforcement learning: load the dataset, render each row, and drop prompts that are too long.

`load_prompts` and `load_eval_prompts` return prompts in dataset order; the RL loop shuffles them. Each prompt keeps its
label and data source, which the reward function receives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.rl import PromptFlags
from openrlhf.data.messages import read_messages
from openrlhf.data.records import Record, Records
from openrlhf.data.rows import EMPTY_PROMPT, Dropped, build_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.data.templates import Chat, fill, open_chat
from openrlhf.errors import DataError
from openrlhf.monitor import say
from openrlhf.types import Prompt

DATASOURCE = "datasource"  # column by which evaluation metrics are grouped
LEAST_KEPT = 0.1  # fraction of the prompts that must fit the budget
USUAL = 0.95  # fraction of the prompts that fit the suggested budget


def load_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Load the training prompts, limited to --max_samples and mixed by --prompt_data_probs."""
    flags = config.prompts
    records = load_dataset_rows(
        str(flags.prompt_data),
        split=flags.prompt_split,
        probs=flags.prompt_data_probs,
        max_samples=flags.max_samples,
        seed=config.batches.seed,
        revisions=flags.dataset_revision,
        loading=config.model,
    )
    return prompt_rows(records, tokenizer, flags, config.template, prompt_budget(config))


def load_eval_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Load the evaluation prompts; empty without --eval_dataset."""
    flags = config.prompts
    if flags.eval_dataset is None:
        return []
    records = load_dataset_rows(
        flags.eval_dataset,
        split=flags.eval_split,
        max_samples=flags.max_samples,
        revisions=flags.eval_revision,
        loading=config.model,
    )
    return prompt_rows(records, tokenizer, flags, config.template, prompt_budget(config))


@dataclass(frozen=True)
class Budget:
    """The longest prompt that leaves room for a response, and the flag that sets it."""

    tokens: int
    flag: str = "--prompt_max_len"
    more: int = 0  # flag value - prompt tokens: the tokens that the flag reserves for the response

    def for_prompts(self, tokens: int) -> str:
        """Return the flag, with its value, that would allow prompts of `tokens` tokens."""
        return f"{self.flag} {tokens + self.more}"


def prompt_budget(config: RLConfig) -> Budget:
    """Return the context length minus the longest response, or minus one token if the response has no limit."""
    rollout = config.rollout
    tokens = rollout.context_length - (rollout.response_length or 1)
    if rollout.max_len is None:
        return Budget(tokens, "--prompt_max_len", rollout.prompt_max_len - tokens)
    return Budget(tokens, "--max_len", rollout.max_len - tokens)


def prompt_rows(
    records: Records, tokenizer: PreTrainedTokenizerBase, flags: PromptFlags, template: TemplateFlags, budget: Budget
) -> list[Prompt]:
    """Make a Prompt from each row that fits the budget, numbered from 0 without gaps."""
    chat = open_chat(tokenizer, template)

    def make(record: Record) -> list[Prompt]:
        text = prompt_text(record, flags.input_key, chat, template)
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Dropped(EMPTY_PROMPT)
        label = "" if flags.label_key is None else record.value(flags.label_key, "--label_key")
        source = str(record.row.get(DATASOURCE, "default"))
        return [Prompt(index=-1, text=text, input_ids=tuple(ids), label=label, datasource=source)]

    prompts = build_rows(records, make)
    check_lengths([len(prompt.input_ids) for prompt in prompts], budget, records.name)
    kept = [prompt for prompt in prompts if len(prompt.input_ids) <= budget.tokens]
    return [replace(prompt, index=index) for index, prompt in enumerate(kept)]


def check_lengths(lengths: Sequence[int], budget: Budget, name: str) -> None:
    """Report how many prompts are dropped because they are too long; raise if hardly any would remain."""
    dropped = sum(length > budget.tokens for length in lengths)
    if not dropped:
        return
    limit = f"the {budget.tokens} tokens that {budget.for_prompts(budget.tokens)} allows"
    found = f"{name}: {dropped} of {len(lengths)} prompts are longer than {limit}"
    usual = sorted(lengths)[math.ceil(USUAL * len(lengths)) - 1]
    if len(lengths) - dropped < LEAST_KEPT * len(lengths):
        raise DataError(
            f"{found}, so almost no prompts would remain",
            try_this=f"{budget.for_prompts(usual)}, which keeps {USUAL:.0%} of them",
        )
    say(f"{found} and are dropped; {budget.for_prompts(max(lengths))} would keep all")


def prompt_text(record: Record, input_key: str, chat: Chat | None, template: TemplateFlags) -> str:
    """Return the prompt as text, rendered with the chat template or the input template."""
    if chat is None:
        return fill(template.input_template, record.text(input_key, "--input_key"))
    messages = read_messages(record, input_key, "--input_key", speaker="user")
    return chat.render(chat.conversation(record, messages), prompt=True).text
