"""Rows for SFT and distillation, with the response, every assistant turn, or the whole text as targets.

`sft_rows` is the entry point. Depending on the flags, a record is a prompt with a response, a conversation in which
every assistant turn is learned (--multiturn), or plain text (--pretrain_mode).
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import ConversationFlags, TeacherResponseFlags, TemplateFlags
from openrlhf.data.findings import check_texts, field_findings, first_rows
from openrlhf.data.messages import says_something
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport, Finding
from openrlhf.data.responses import check_fields, mark_response, read_conversation
from openrlhf.data.rows import (
    EMPTY_PROMPT,
    EMPTY_RESPONSE,
    Dropped,
    Loaded,
    build_rows,
    encode_response,
    long_prompt,
    long_prompt_reason,
)
from openrlhf.data.templates import Chat, RewritesHistory, open_chat
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
    if fields.pretrain_mode:
        rows = pretrain_rows(records, tokenizer, fields.input_key, report)
    else:
        report.add(*field_findings(first_rows(records), (fields.input_key, fields.output_key), template))
        rows = response_rows(records, tokenizer, fields, template, report)
    return Loaded(rows, check_texts(report, tokenizer))


def response_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: TeacherResponseFlags,
    template: TemplateFlags,
    report: DataReport,
) -> list[TokenRow]:
    """Make rows whose response, or every assistant turn, is learned."""
    check_tokenizer(tokenizer)
    chat = open_chat(tokenizer, template)
    if isinstance(fields, ConversationFlags) and fields.multiturn:
        if chat is None:
            raise ConfigError("--multiturn needs the chat template to find the turns", try_this="--apply_chat_template")
        return multiturn_rows(records, chat, fields, report)
    check_fields(fields, chat)
    max_len = report.budget.tokens

    def make(record: Record) -> list[TokenRow]:
        marked = mark_response(record, fields, chat, template.input_template)
        if marked.spans[0][0] == 0:
            raise Dropped(EMPTY_PROMPT)
        return [encode_response(marked, tokenizer, max_len, report).row]

    return build_rows(records, make, report)


def pretrain_rows(
    records: Records, tokenizer: PreTrainedTokenizerBase, input_key: str, report: DataReport
) -> list[TokenRow]:
    """Make rows of whole texts, truncated to --max_len; all tokens but the first are learned, and no EOS is added."""
    check_fast(tokenizer)

    def make(record: Record) -> list[TokenRow]:
        text = record.text(input_key, "--input_key")
        whole = tokenize(text, tokenizer)[0]  # [tokens]
        ids = whole[: report.budget.tokens]
        if len(ids) < 2:
            raise Dropped("with fewer than two tokens")
        report.keep((text, len(whole)))
        return [TokenRow(ids, np.arange(len(ids)) > 0)]

    return build_rows(records, make, report)


def multiturn_rows(records: Records, chat: Chat, fields: ConversationFlags, report: DataReport) -> list[TokenRow]:
    """Make rows in which every assistant turn is learned.

    A template may drop the reasoning of earlier turns, so the full text does not contain these turns as generated. Such
    a conversation is split into one row per turn: the conversation up to that turn, with only that turn learned.
    """
    max_len = report.budget.tokens
    split = 0  # number of conversations that were split into one row per turn
    too_long = 0  # number of turns omitted because their context fills --max_len

    def make(record: Record) -> list[TokenRow]:
        nonlocal split, too_long
        messages = read_conversation(record, fields)
        while messages and messages[-1]["role"] != "assistant":  # messages after the last assistant turn are not needed
            messages.pop()
        conversation = chat.conversation(record, messages)
        turns = conversation.assistant_turns
        if not turns:
            raise Dropped("without an assistant turn")
        spoken = [turn for turn in turns if says_something(conversation.messages[turn])]
        if not spoken:
            raise Dropped(EMPTY_RESPONSE)
        try:
            marked = [chat.mark_turns(conversation, 0)]
        except RewritesHistory:
            split += 1
            marked = [chat.mark_response(conversation.first(turn + 1), turn) for turn in spoken]
        encoded = [encode(text, chat.tokenizer, max_len) for text in marked]
        kept = [item for item in encoded if item.prompt_length < max_len - 2]
        if not kept:
            raise long_prompt(max_len, max(item.length for item in encoded))
        too_long += len(encoded) - len(kept)
        for item in kept:
            report.keep((item.text, item.length))
            report.without_eos += not item.learns_eos
        return [item.row for item in kept]

    rows = build_rows(records, make, report)
    if split:
        problem = (
            f"the chat template rewrites earlier turns: split {counted(split, 'conversation')} into one sample per"
            f" assistant turn, each with the context of that turn; dropped {counted(too_long, 'turn')}"
            f" {long_prompt_reason(max_len)}"
        )
        report.add(Finding(problem))
    return rows
