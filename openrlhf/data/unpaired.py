"""Rows for KTO: responses labelled good or bad, and the mismatched pairs from which its baseline is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from openrlhf.data.records import describe
from openrlhf.data.responses import check_fields, mark_response
from openrlhf.data.rows import build_rows, long_prompt
from openrlhf.data.templates import open_chat
from openrlhf.data.tokens import check_tokenizer, encode
from openrlhf.types import LabelledRow, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.sections.data import LabelledResponseFlags, TemplateFlags
    from openrlhf.data.records import Record, Records


def labelled_rows(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    fields: LabelledResponseFlags,
    template: TemplateFlags,
    max_len: int,
) -> list[LabelledRow]:
    """Make rows for KTO: the formats of SFT, with a label of 1 (desirable) or 0."""
    check_tokenizer(tokenizer)
    chat = open_chat(tokenizer, template)
    check_fields(fields, chat)

    def make(record: Record) -> list[LabelledRow]:
        label = read_label(record, fields.label_key)
        encoded = encode(mark_response(record, fields, chat, template.input_template), tokenizer, max_len)
        if encoded.prompt_length >= max_len - 2:
            raise long_prompt(max_len)
        return [LabelledRow(encoded.row, encoded.prompt_length, label)]

    return build_rows(records, make)


def read_label(record: Record, field: str) -> bool:
    value = record.value(field, "--label_key")
    if not isinstance(value, int | float) or value not in (0, 1):
        raise record.place.error(f"0, 1, true or false is wanted, but {describe(value)} came", field)
    return bool(value)


def mismatched(rows: Sequence[LabelledRow], max_len: int) -> list[TokenRow]:
    """Pair each prompt with the next row's response, the last with the first's; cut to `max_len`, EOS at the end."""
    return [join(row, other, max_len) for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True)]


def join(row: LabelledRow, other: LabelledRow, max_len: int) -> TokenRow:
    """Join one row's prompt and another row's response."""
    begin, length = other.prompt_length, row.prompt_length
    ids = np.concatenate([row.tokens.input_ids[:length], other.tokens.input_ids[begin:]])[:max_len]
    mask = np.concatenate([row.tokens.target_mask[:length], other.tokens.target_mask[begin:]])[:max_len]
    ids[-1] = other.tokens.input_ids[-1]  # every row ends in EOS
    return TokenRow(ids, mask)
