"""Rows for learning from preferences: pairs for reward models and DPO, labelled single responses for KTO.

`data.supervised` calls `preference_rows` and `labelled_rows`. KTO's objective also calls `mismatch_rows` in each step
to compute its baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import LabelledResponseFlags, PairFlags, TemplateFlags
from openrlhf.data.findings import check_texts, field_findings, first_rows, template_ends_in_space, unused_prompt
from openrlhf.data.messages import read_messages, read_text
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport, Finding
from openrlhf.data.responses import check_fields, mark_plain, mark_response
from openrlhf.data.row_cache import load_rows
from openrlhf.data.rows import EMPTY_PROMPT, EMPTY_RESPONSE, NO_ANSWER, Dropped, Loaded, encode_response, long_prompt
from openrlhf.data.templates import TextFormat, open_format
from openrlhf.data.tokens import Marked, check_tokenizer, encode
from openrlhf.types import LabelledRow, PairRow, TokenRow


def preference_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: PairFlags,
    template: TemplateFlags,
    max_len: int,
    *,
    drop_long_prompts: bool,
) -> Loaded[PairRow]:
    """Make pairs for a reward model or DPO.

    A reward model can score truncated texts, so it keeps long prompts. DPO drops them (`drop_long_prompts`), because
    the response would be cut off.
    """
    check_tokenizer(tokenizer)
    report = DataReport(records.name, Budget(max_len, "--max_len"))
    first, keys = first_rows(records), (fields.prompt_key, fields.chosen_key, fields.rejected_key)
    report.add(*field_findings(first, keys, template))
    report.add(unused_prompt(first, fields))
    form = open_format(tokenizer, template)
    rows = load_rows(records, PairReader(form, fields, max_len, drop_long_prompts), report)
    if report.empty_sides:
        report.add(Finding(f"{report.empty_sides} of {len(rows)} pairs have a side {EMPTY_RESPONSE}"))
    return Loaded(rows, check_texts(report, tokenizer))


@dataclass(frozen=True)
class PairReader:
    """Reader of pairs: a chosen and a rejected response."""

    kind: ClassVar[type] = PairRow
    form: TextFormat
    fields: PairFlags
    max_len: int
    drop_long_prompts: bool

    def make(self, record: Record, report: DataReport) -> list[PairRow]:
        fields, max_len = self.fields, self.max_len
        sides = ((fields.chosen_key, "--chosen_key"), (fields.rejected_key, "--rejected_key"))
        texts = [mark_side(record, fields, side, flag, self.form) for side, flag in sides]
        if texts[0].text == texts[1].text:
            raise Dropped("with chosen equal to rejected")
        chosen, rejected = (encode(text, self.form.tokenizer, max_len) for text in texts)
        if self.drop_long_prompts and max(chosen.prompt_length, rejected.prompt_length) >= max_len - 2:
            raise long_prompt(max_len, max(chosen.length, rejected.length))
        if np.array_equal(chosen.row.input_ids, rejected.row.input_ids):
            raise Dropped(f"with chosen equal to rejected within --max_len {max_len}")
        row = PairRow(chosen.row, rejected.row, record.number("margin", default=0.0))
        report.keep((chosen.text, chosen.length), (rejected.text, rejected.length))
        if self.drop_long_prompts:  # a reward model does not learn tokens
            report.without_eos += not (chosen.learns_eos and rejected.learns_eos)
        report.empty_sides += any(is_empty(text, str(self.form.tokenizer.eos_token)) for text in texts)
        return [row]


def is_empty(marked: Marked, eos: str) -> bool:
    """Return whether a response has no text; a chat template may have added EOS."""
    return not any(marked.text[begin:end].replace(eos, "").strip() for begin, end in marked.spans)


def mark_side(record: Record, fields: PairFlags, side: str, flag: str, form: TextFormat) -> Marked:
    """Return the prompt followed by one response, with the response as the learned span.

    Without --prompt_key, a conversation contains both, and a plain text is treated as the response.
    """
    chat = form.chat
    if chat is None:
        prompt = ""
        if fields.prompt_key is not None:
            prompt = form.fill(read_text(record, fields.prompt_key, "--prompt_key"))
        return mark_plain(prompt, read_text(record, side, flag))
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
    conversation = chat.conversation(record, messages)
    added = len(conversation.messages) - len(messages)  # 1 if a system message was prepended
    return chat.mark_response(conversation, before + added)


def labelled_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: LabelledResponseFlags,
    template: TemplateFlags,
    max_len: int,
) -> Loaded[LabelledRow]:
    """Make rows for KTO: as for SFT, with a label of 1 (desirable) or 0."""
    check_tokenizer(tokenizer)
    form = open_format(tokenizer, template)
    check_fields(fields, form, records)
    report = DataReport(records.name, Budget(max_len, "--max_len"))
    report.add(*field_findings(first_rows(records), (fields.input_key, fields.output_key), template))
    rows = load_rows(records, LabelledReader(form, fields, max_len), report)
    report.add(template_ends_in_space(report, template))
    if len(rows) > 1 and report.desirable in (0, len(rows)):
        kind = "desirable" if report.desirable else "undesirable"
        report.add(Finding(f"all {len(rows)} responses are {kind}, so there is nothing to tell apart"))
    return Loaded(rows, check_texts(report, tokenizer))


@dataclass(frozen=True)
class LabelledReader:
    """Reader of single responses, each with a label."""

    kind: ClassVar[type] = LabelledRow
    form: TextFormat
    fields: LabelledResponseFlags
    max_len: int

    def make(self, record: Record, report: DataReport) -> list[LabelledRow]:
        label = record.value(self.fields.label_key, "--label_key")
        if not isinstance(label, int | float) or label not in (0, 1):
            raise record.at(self.fields.label_key).mismatch("0, 1, true or false", label)
        marked = mark_response(record, self.fields, self.form)
        encoded = encode_response(marked, self.form.tokenizer, self.max_len, report)
        report.desirable += bool(label)
        return [LabelledRow(encoded.row, encoded.prompt_length, bool(label))]


def mismatch_rows(rows: Sequence[LabelledRow], max_len: int) -> list[TokenRow]:
    """Join each prompt with the response of the next row, and the last prompt with the first response.

    Rows are truncated to `max_len` tokens and end in EOS.
    """
    mismatched: list[TokenRow] = []
    for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True):
        length, begin = row.prompt_length, other.prompt_length
        # prompt of `row` + response of `other`
        ids = np.concatenate([row.tokens.input_ids[:length], other.tokens.input_ids[begin:]])[:max_len]
        mask = np.concatenate([row.tokens.target_mask[:length], other.tokens.target_mask[begin:]])[:max_len]
        ids[-1] = other.tokens.input_ids[-1]  # every row ends in EOS
        if length + len(other.tokens.input_ids) - begin > max_len:
            mask[-1] = False  # the response was cut: the model must not learn to end there
        mismatched.append(TokenRow(ids, mask))
    return mismatched
