"""Prompts for reinforcement learning, from the rows of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf.config.sections.data import Template
from openrlhf.config.sections.rl import Prompts
from openrlhf.data.messages import read_messages
from openrlhf.data.records import Record, Records
from openrlhf.data.rows import Dropped, build_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.data.templates import Chat, fill, open_chat
from openrlhf.errors import DataError
from openrlhf.monitor import say
from openrlhf.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.commands import RLConfig

DATASOURCE = "datasource"  # the column that groups evaluation metrics
LEAST_KEPT = 0.1  # share of the prompts that must fit their budget
USUAL = 0.95  # share of the prompts that an advised budget keeps


def load_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The training prompts, capped and mixed as the flags say."""
    flags = config.prompts
    records = load_dataset_rows(
        str(flags.prompt_data),
        split=flags.prompt_split,
        probs=None if flags.prompt_data_probs is None else [float(p) for p in flags.prompt_data_probs.split(",")],
        max_samples=flags.max_samples,
        seed=config.batches.seed,
        use_ms=config.model.use_ms,
        trust_remote_code=config.model.trust_remote_code,
    )
    return prompt_rows(records, tokenizer, flags, config.template, prompt_budget(config))


def load_eval_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The evaluation prompts; none where no evaluation set is named."""
    flags = config.prompts
    if flags.eval_dataset is None:
        return []
    records = load_dataset_rows(
        flags.eval_dataset,
        split=flags.eval_split,
        max_samples=flags.max_samples,
        use_ms=config.model.use_ms,
        trust_remote_code=config.model.trust_remote_code,
    )
    return prompt_rows(records, tokenizer, flags, config.template, prompt_budget(config))


@dataclass(frozen=True)
class Budget:
    """Tokens that a prompt may have, so that a response still fits, and the flag that says so."""

    tokens: int
    flag: str = "--prompt_max_len"
    more: int = 0  # tokens that the flag counts beside the prompt's

    def for_prompts(self, tokens: int) -> str:
        """The flag for prompts of so many tokens."""
        return f"{self.flag} {tokens + self.more}"


def prompt_budget(config: RLConfig) -> Budget:
    rollout = config.rollout
    tokens = rollout.context_length - (rollout.response_length or 1)
    if rollout.max_len is None:
        return Budget(tokens, "--prompt_max_len", rollout.prompt_max_len - tokens)
    return Budget(tokens, "--max_len", rollout.max_len - tokens)


def prompt_rows(
    records: Records, tokenizer: PreTrainedTokenizerBase, flags: Prompts, template: Template, budget: Budget
) -> list[Prompt]:
    """A Prompt for each row that fits the budget."""
    chat = open_chat(tokenizer, template)

    def make(record: Record) -> Iterable[tuple[str, tuple[int, ...], Any, str]]:
        text = prompt_text(record, flags.input_key, chat, template)
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Dropped("an empty prompt")
        label = "" if flags.label_key is None else record.value(flags.label_key, "--label_key")
        source = record.row.get(DATASOURCE, "default")
        yield text, tuple(ids), label, str(source)

    made = build_rows(records, make)
    check_lengths([len(ids) for _, ids, _, _ in made], budget, records.name)
    kept = (values for values in made if len(values[1]) <= budget.tokens)
    return [Prompt(number, *values) for number, values in enumerate(kept)]


def check_lengths(lengths: Sequence[int], budget: Budget, name: str) -> None:
    """A line for prompts that are too long and dropped; an error if hardly any are left."""
    dropped = sum(length > budget.tokens for length in lengths)
    if not dropped:
        return
    limit = f"the {budget.tokens} tokens that {budget.for_prompts(budget.tokens)} leaves them"
    found = f"{name}: {dropped} of {len(lengths)} prompts are longer than {limit}"
    usual = sorted(lengths)[math.ceil(USUAL * len(lengths)) - 1]
    if len(lengths) - dropped < LEAST_KEPT * len(lengths):
        raise DataError(
            f"{found}, so hardly anything would be trained on",
            try_this=f"{budget.for_prompts(usual)}, which keeps {USUAL:.0%} of them",
        )
    say(f"{found}, and are dropped; {budget.for_prompts(max(lengths))} would keep all")


def prompt_text(record: Record, input_key: str, chat: Chat | None, template: Template) -> str:
    """What the model reads: the chat template up to where it answers, or the input in its template."""
    if chat is None:
        return fill(template.input_template, record.text(input_key, "--input_key"))
    messages = read_messages(record, input_key, "--input_key", speaker="user")
    return chat.render(chat.conversation(record, messages), prompt=True).text
