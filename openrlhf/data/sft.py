"""Rows for SFT and distillation, which learn the response, every assistant turn, or the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openrlhf.data.messages import says_something
from openrlhf.data.responses import EMPTY_PROMPT, EMPTY_RESPONSE, check_fields, mark_response, read_conversation
from openrlhf.data.rows import Dropped, build_rows, long_prompt
from openrlhf.data.templates import Chat, RewritesHistory, open_chat
from openrlhf.data.tokens import Marked, check_fast, check_tokenizer, encode, tokenize
from openrlhf.errors import ConfigError
from openrlhf.monitor import say
from openrlhf.types import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.sections.data import ConversationFlags, TemplateFlags
    from openrlhf.data.messages import Conversation
    from openrlhf.data.records import Record, Records


def sft_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: ConversationFlags,
    template: TemplateFlags,
    max_len: int,
) -> list[TokenRow]:
    """Make rows for SFT: plain, chat, every assistant turn, or continued pre-training, as the flags say."""
    if fields.pretrain_mode:
        return pretrain_rows(records, tokenizer, fields.input_key, max_len)
    check_tokenizer(tokenizer)
    chat = open_chat(tokenizer, template)
    if fields.multiturn:
        if chat is None:
            raise ConfigError("--multiturn finds the turns by the chat template", try_this="--apply_chat_template")
        return multiturn_rows(records, chat, fields, max_len)
    check_fields(fields, chat)

    def make(record: Record) -> list[TokenRow]:
        return [keep(mark_response(record, fields, chat, template.input_template), tokenizer, max_len)]

    return build_rows(records, make)


def pretrain_rows(records: Records, tokenizer: PreTrainedTokenizerBase, input_key: str, max_len: int) -> list[TokenRow]:
    """Make rows of whole texts, cut to `max_len`; every token but the first is learned, and no EOS is added."""
    check_fast(tokenizer)

    def make(record: Record) -> list[TokenRow]:
        ids = tokenize(record.text(input_key, "--input_key"), tokenizer)[0][:max_len]
        if len(ids) < 2:
            raise Dropped("with fewer than two tokens")
        return [TokenRow(ids, np.arange(len(ids)) > 0)]

    return build_rows(records, make)


def multiturn_rows(records: Records, chat: Chat, fields: ConversationFlags, max_len: int) -> list[TokenRow]:
    """Make rows in which every assistant turn is learned; see `Turns` for templates that rewrite history."""
    turns = Turns(chat)

    def make(record: Record) -> list[TokenRow]:
        messages = read_conversation(record, fields)
        while messages and messages[-1]["role"] != "assistant":  # trailing messages have no answer to learn
            messages.pop()
        talk = chat.conversation(record, messages)
        if not talk.assistant_turns:
            raise Dropped("without an assistant turn")
        if not any(says_something(talk.messages[turn]) for turn in talk.assistant_turns):
            raise Dropped(EMPTY_RESPONSE)
        encoded = [encode(marked, chat.tokenizer, max_len) for marked in turns.mark(talk)]
        rows = [item.row for item in encoded if item.prompt_length < max_len - 2]
        if not rows:
            raise long_prompt(max_len)
        turns.too_long += len(encoded) - len(rows)
        return rows

    rows = build_rows(records, make)
    if turns.split:
        say(
            f"the chat template rewrites earlier turns: {turns.split} conversations became one sample per assistant"
            f" turn, each in the context that the model would see; {turns.too_long} turns {long_prompt(max_len)}"
            " were left out"
        )
    return rows


@dataclass
class Turns:
    """Mark every assistant turn, and count the conversations that had to be split.

    A template may drop the reasoning of earlier turns, so a turn as generated does not appear in the full text. Such a
    conversation becomes one sample per turn: the conversation up to that turn, with only that turn learned.
    """

    chat: Chat
    split: int = 0  # conversations
    too_long: int = 0  # turns left out because their context fills --max_len

    def mark(self, talk: Conversation) -> list[Marked]:
        try:
            return [self.chat.mark_turns(talk, 0)]
        except RewritesHistory:
            self.split += 1
        spoken = [turn for turn in talk.assistant_turns if says_something(talk.messages[turn])]
        return [self.chat.mark_response(talk.first(turn + 1), turn) for turn in spoken]


def keep(marked: Marked, tokenizer: PreTrainedTokenizerBase, max_len: int) -> TokenRow:
    """Encode a row; drop it if prompt or response is empty, or if the prompt leaves no room for a response."""
    if not marked.spans:
        raise Dropped(EMPTY_RESPONSE)
    if marked.spans[0][0] == 0:
        raise Dropped(EMPTY_PROMPT)
    encoded = encode(marked, tokenizer, max_len)
    if encoded.prompt_length >= max_len - 2:
        raise long_prompt(max_len)
    return encoded.row
