"""Rows for SFT and distillation, with the response, every assistant turn, or the whole text as targets.

`sft_rows` is the entry point. Depending on the flags, a record is a prompt with a response, a conversation in which
every assistant turn is learned (--multiturn), or plain text (--pretrain_mode); each has its reader below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import ConversationFlags, ResponseFlags, TeacherResponseFlags, TemplateFlags
from openrlhf.data.findings import check_texts, field_findings, first_rows, template_ends_in_space
from openrlhf.data.messages import says_something
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport, Finding
from openrlhf.data.responses import check_fields, mark_response, read_conversation
from openrlhf.data.row_cache import load_rows
from openrlhf.data.rows import (
    EMPTY_PROMPT,
    EMPTY_RESPONSE,
    Dropped,
    Loaded,
    RowReader,
    encode_response,
    long_prompt,
    long_prompt_reason,
)
from openrlhf.data.templates import Chat, RewritesHistory, TextFormat, open_format
from openrlhf.data.tokens import check_fast, check_tokenizer, encode, tokenize
from openrlhf.errors import ConfigError, counted
from openrlhf.types import TokenRow


def sft_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: TeacherResponseFlags,
    template: TemplateFlags,
    max_len: int,
) -> Loaded[TokenRow]:
    """Make rows for SFT in the format that the flags select."""
    report = DataReport(records.name, Budget(max_len, "--max_len"))
    if not fields.pretrain_mode:
        report.add(*field_findings(first_rows(records), (fields.input_key, fields.output_key), template))
    reader = open_reader(tokenizer, fields, template, max_len)
    if isinstance(reader, ResponseReader):
        check_fields(fields, reader.form, records)
    rows = load_rows(records, reader, report)
    report.add(template_ends_in_space(report, template))
    if report.split_conversations:
        problem = (
            f"the chat template rewrites earlier turns: split {counted(report.split_conversations, 'conversation')}"
            f" into one sample per assistant turn, each with the context of that turn; dropped"
            f" {counted(report.long_turns, 'turn')} {long_prompt_reason(max_len)}"
        )
        report.add(Finding(problem))
    return Loaded(rows, check_texts(report, tokenizer))


def open_reader(
    tokenizer: PreTrainedTokenizerBase, fields: TeacherResponseFlags, template: TemplateFlags, max_len: int
) -> RowReader[TokenRow]:
    """Return the reader for the format that the flags select; raise if the tokenizer or the flags do not fit it."""
    if fields.pretrain_mode:
        check_fast(tokenizer)
        return TextReader(tokenizer, fields.input_key, max_len)
    check_tokenizer(tokenizer)
    form = open_format(tokenizer, template)
    if isinstance(fields, ConversationFlags) and fields.multiturn:
        if form.chat is None:
            raise ConfigError("--multiturn needs the chat template to find the turns", try_this="--apply_chat_template")
        return ConversationReader(form.chat, fields, max_len)
    return ResponseReader(form, fields, max_len)


@dataclass(frozen=True)
class ResponseReader:
    """Reader of prompts with a response, which is learned."""

    kind: ClassVar[type] = TokenRow
    form: TextFormat
    fields: ResponseFlags
    max_len: int

    def make(self, record: Record, report: DataReport) -> list[TokenRow]:
        marked = mark_response(record, self.fields, self.form)
        if marked.spans[0][0] == 0:
            raise Dropped(EMPTY_PROMPT)
        return [encode_response(marked, self.form.tokenizer, self.max_len, report).row]


@dataclass(frozen=True)
class TextReader:
    """Reader of plain texts, truncated to --max_len; all tokens but the first are learned, and no EOS is added."""

    kind: ClassVar[type] = TokenRow
    tokenizer: PreTrainedTokenizerBase
    input_key: str
    max_len: int

    def make(self, record: Record, report: DataReport) -> list[TokenRow]:
        text = record.text(self.input_key, "--input_key")
        whole = tokenize(text, self.tokenizer)[0]  # [tokens]
        ids = whole[: self.max_len]
        if len(ids) < 2:
            raise Dropped("with fewer than two tokens")
        report.keep((text, len(whole)))
        return [TokenRow(ids, np.arange(len(ids)) > 0)]


@dataclass(frozen=True)
class ConversationReader:
    """Reader of conversations in which every assistant turn is learned.

    A template may drop the reasoning of earlier turns, so the full text does not contain these turns as generated. Such
    a conversation is split into one row per turn: the conversation up to that turn, with only that turn learned.
    """

    kind: ClassVar[type] = TokenRow
    chat: Chat
    fields: ConversationFlags
    max_len: int

    def make(self, record: Record, report: DataReport) -> list[TokenRow]:
        messages = read_conversation(record, self.fields)
        while messages and messages[-1]["role"] != "assistant":  # messages after the last assistant turn are not needed
            messages.pop()
        conversation = self.chat.conversation(record, messages)
        turns = conversation.assistant_turns
        if not turns:
            raise Dropped("without an assistant turn")
        spoken = [turn for turn in turns if says_something(conversation.messages[turn])]
        if not spoken:
            raise Dropped(EMPTY_RESPONSE)
        try:
            marked = [self.chat.mark_turns(conversation, 0)]
        except RewritesHistory:
            report.split_conversations += 1
            marked = [self.chat.mark_response(conversation.first(turn + 1), turn) for turn in spoken]
        encoded = [encode(text, self.chat.tokenizer, self.max_len) for text in marked]
        kept = [item for item in encoded if item.prompt_length < self.max_len - 2]
        if not kept:
            raise long_prompt(self.max_len, max(item.length for item in encoded))
        report.long_turns += len(encoded) - len(kept)
        for item in kept:
            report.keep((item.text, item.length))
            report.without_eos += not item.learns_eos
        return [item.row for item in kept]
