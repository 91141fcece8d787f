"""Prompts for reinforcement learning, from the rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.config.sections.data import Template
from openrlhf.config.sections.rl import Prompts
from openrlhf.data.messages import read_messages
from openrlhf.data.records import Record, Records
from openrlhf.data.rows import Dropped, build_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.data.templates import Chat, fill, open_chat
from openrlhf.monitor import say
from openrlhf.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.commands import RLConfig

DATASOURCE = "datasource"  # the column that groups evaluation metrics


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


def prompt_budget(config: RLConfig) -> int:
    """Tokens that a prompt may have, so that a response still fits."""
    rollout = config.rollout
    return rollout.context_length - (rollout.response_length or 1)


def prompt_rows(
    records: Records, tokenizer: PreTrainedTokenizerBase, flags: Prompts, template: Template, budget: int
) -> list[Prompt]:
    """A Prompt for each row; longer ones keep their end, and a line says how many were cut."""
    chat = open_chat(tokenizer, template)
    cut = 0

    def make(record: Record) -> Iterable[tuple[str, tuple[int, ...], Any, str]]:
        nonlocal cut
        text = prompt_text(record, flags.input_key, chat, template)
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Dropped("an empty prompt")
        cut += len(ids) > budget
        label = "" if flags.label_key is None else record.value(flags.label_key, "--label_key")
        source = record.row.get(DATASOURCE, "default")
        yield text, tuple(ids[-budget:]), label, str(source)

    made = build_rows(records, make)
    if cut:
        say(f"{cut} of {len(made)} prompts are longer than {budget} tokens and keep their end")
    return [Prompt(number, *values) for number, values in enumerate(made)]


def prompt_text(record: Record, input_key: str, chat: Chat | None, template: Template) -> str:
    """What the model reads: the chat template up to where it answers, or the input in its template."""
    if chat is None:
        return fill(template.input_template, record.text(input_key, "--input_key"))
    messages = read_messages(record, input_key, "--input_key", speaker="user")
    return chat.render(chat.conversation(record, messages), prompt=True).text
