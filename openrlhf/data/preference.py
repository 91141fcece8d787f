"""Rows with a chosen and a rejected response to the same prompt, for reward models and DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from openrlhf.data.messages import read_messages
from openrlhf.data.responses import EMPTY_PROMPT, NO_ANSWER, mark_plain
from openrlhf.data.rows import Dropped, build_rows, long_prompt
from openrlhf.data.templates import Chat, fill, open_chat
from openrlhf.data.tokens import Marked, check_tokenizer, encode
from openrlhf.types import PairRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.sections.data import PairFlags, TemplateFlags
    from openrlhf.data.records import Record, Records


def preference_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: PairFlags,
    template: TemplateFlags,
    max_len: int,
    *,
    drop_long_prompts: bool,
) -> list[PairRow]:
    """Make pairs for a reward model or DPO.

    A reward model reads cut texts too, so long prompts are kept; DPO drops them (`drop_long_prompts`), because it
    needs room for the response.
    """
    check_tokenizer(tokenizer)
    chat = open_chat(tokenizer, template)

    def make(record: Record) -> list[PairRow]:
        sides = ((fields.chosen_key, "--chosen_key"), (fields.rejected_key, "--rejected_key"))
        texts = [mark_side(record, fields, side, flag, chat, template) for side, flag in sides]
        if texts[0].text == texts[1].text:
            raise Dropped("with chosen equal to rejected")
        chosen, rejected = (encode(text, tokenizer, max_len) for text in texts)
        if drop_long_prompts and max(chosen.prompt_length, rejected.prompt_length) >= max_len - 2:
            raise long_prompt(max_len)
        if np.array_equal(chosen.row.input_ids, rejected.row.input_ids):
            raise Dropped(f"with chosen equal to rejected as far as --max_len {max_len} reaches")
        return [PairRow(chosen.row, rejected.row, record.number("margin", default=0.0))]

    return build_rows(records, make)


def mark_side(
    record: Record, fields: PairFlags, side: str, flag: str, chat: Chat | None, template: TemplateFlags
) -> Marked:
    """Return the prompt followed by one response, with the response as the learned span.

    Without --prompt_key, a conversation holds both, and all of a plain text counts as the response.
    """
    if chat is None:
        prompt = ""
        if fields.prompt_key is not None:
            prompt = fill(template.input_template, record.text(fields.prompt_key, "--prompt_key"))
        return mark_plain(prompt, record.text(side, flag))
    if fields.prompt_key is None:
        messages = read_messages(record, side, flag)
        before = len(messages) - 1
    else:
        prompt_messages = read_messages(record, fields.prompt_key, "--prompt_key", speaker="user")
        messages = prompt_messages + read_messages(record, side, flag, speaker="assistant")
        before = len(prompt_messages)
    if before < 1:
        raise Dropped(EMPTY_PROMPT)
    if len(messages) == before or messages[-1]["role"] != "assistant":
        raise Dropped(NO_ANSWER)
    talk = chat.conversation(record, messages)
    return chat.mark_response(talk, before + len(talk.messages) - len(messages))
