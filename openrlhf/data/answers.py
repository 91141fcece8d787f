"""Rows for batch inference: prompts to generate answers for (`generate`), and answers to score (`rm`).

`inference.generate` calls `read_prompts`, and `inference.batch_inference` calls `read_answers`. Each answer is written
with the index of its prompt, so that scoring can compare the answers to the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.data import ResponseFlags
from openrlhf.data.findings import check_texts, field_findings, first_rows
from openrlhf.data.prompts import prompt_text
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport
from openrlhf.data.responses import mark_response
from openrlhf.data.rows import EMPTY_PROMPT, Dropped, Loaded, build_rows
from openrlhf.data.templates import open_format
from openrlhf.data.tokens import check_tokenizer, encode
from openrlhf.errors import DataError, counted
from openrlhf.types import Prompt

INDEX = "index"  # output column with the row number of the prompt


@dataclass(frozen=True)
class Answer:
    """A prompt and a response as texts, and their tokens as input of a reward model."""

    prompt: str
    response: str
    index: int | str | None  # index of the prompt; None: the prompt is identified by its text
    input_ids: NDArray[np.int32]  # [tokens]


def with_condition(prompt: str, condition: str) -> str:
    """Append a condition, such as the desired reward, to a prompt, with one space on either side.

    Training and generation both call this function, so that they use the same text.
    """
    return f"{prompt}{'' if prompt[-1:].isspace() else ' '}{condition} "


def iteration_slice(records: Records, number: int | None, size: int) -> tuple[Records, int]:
    """Return the rows of slice `number` and the index of its first row; all rows if `number` is None."""
    if number is None:
        return records, 0
    first = number * size
    if first >= len(records):
        raise DataError(
            f"--iter {number} with --rollout_batch_size {size} begins at row {first} of {records.name},"
            f" which has {counted(len(records), 'row')}",
            try_this=f"--iter 0 to {(len(records) - 1) // size}",
        )
    return Records(records.sources, records.order[first : first + size]), first


def read_prompts(
    records: Records,
    tokenizer: PreTrainedTokenizerBase,
    config: BatchInferenceConfig,
    *,
    first_index: int,
    budget: Budget,
) -> Loaded[Prompt]:
    """Make a Prompt from each row, numbered as in the whole dataset.

    Prompts longer than the budget are truncated at the start, and the report counts them.
    """
    template, sampling = config.template, config.sampling
    form = open_format(tokenizer, template)
    indices = count(first_index)  # dropped rows are counted too
    report = DataReport(records.name, budget, cut_at="start")
    report.add(*field_findings(first_rows(records), (config.data.input_key,), template))

    def make(record: Record) -> list[Prompt]:
        index = next(indices)
        text = prompt_text(record, config.data.input_key, form)
        if not text.strip():
            raise Dropped(EMPTY_PROMPT)
        if sampling.enable_csft:
            text = with_condition(text, sampling.csft_prompt)
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        report.keep((text, len(ids)))
        return [Prompt(index, text, tuple(ids[-budget.tokens :]))]

    prompts = build_rows(records, make, report)
    return Loaded(prompts, check_texts(report, tokenizer))


def read_answers(records: Records, tokenizer: PreTrainedTokenizerBase, config: BatchInferenceConfig) -> Loaded[Answer]:
    """Tokenise prompts with responses as in reward model training: with EOS, truncated to --max_len.

    The texts of an Answer are not truncated, because they are written to the output.
    """
    check_tokenizer(tokenizer)
    fields = ResponseFlags(input_key=config.data.input_key, output_key=config.data.output_key)
    form = open_format(tokenizer, config.template)
    report = DataReport(records.name, Budget(config.data.max_len, "--max_len"))
    report.add(*field_findings(first_rows(records), (fields.input_key, fields.output_key), config.template))

    def make(record: Record) -> list[Answer]:
        marked = mark_response(record, fields, form)
        start, end = marked.spans[0][0], marked.spans[-1][1]
        encoded = encode(marked, tokenizer, config.data.max_len)
        index = record.row.get(INDEX)
        if index is not None and (isinstance(index, bool) or not isinstance(index, int | str)):
            raise record.at(INDEX).mismatch("the row number of a prompt", index)
        report.keep((encoded.text, encoded.length))
        return [Answer(marked.text[:start], marked.text[start:end], index, encoded.row.input_ids)]

    rows = build_rows(records, make, report)
    return Loaded(rows, check_texts(report, tokenizer))
