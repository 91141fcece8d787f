"""The loop that builds all rows of a dataset, counts dropped rows, and raises an error if hardly any are left.

`build_rows` takes a function that makes the rows of one record. The function raises a DataError for invalid data, which
ends the run, and `Dropped` for a valid record that cannot be trained on, which is counted in the dataset's report.
Rows to train on are made by a `RowReader`, so that `row_cache` can make them in parallel and keep them on disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from openrlhf.data.records import Record, Records
from openrlhf.data.report import DataReport
from openrlhf.data.tokens import Encoded, Marked, encode
from openrlhf.monitor import is_main_process, say

LARGE = 2000  # minimum number of rows for a progress bar

LabelText = Callable[[float], str]  # names the label of a step
NUMBER: LabelText = "{:g}".format

Row = TypeVar("Row")
MadeRow = TypeVar("MadeRow", covariant=True)
LoadedRow = TypeVar("LoadedRow", covariant=True)


class Dropped(Exception):
    """Raised for a valid row that cannot be trained on; the message completes "3 rows ..."."""


class TooLong(Dropped):
    """Raised for a row that is dropped because it is too long."""

    def __init__(self, reason: str, *, tokens: int) -> None:
        super().__init__(reason)
        self.tokens = tokens  # tokens of the whole row


@dataclass(frozen=True)
class Loaded(Generic[LoadedRow]):
    """Rows of one kind, and the report of the dataset that they were made from.

    The labels of process reward models are either all soft (the probability of the first reward token) or all hard (an
    index into the reward tokens, or a vocabulary id if no reward tokens are given).
    """

    rows: Sequence[LoadedRow]
    report: DataReport
    label_text: LabelText = NUMBER  # names the labels of steps

    @property
    def soft_labels(self) -> bool:
        return self.report.soft_labels is True


class RowReader(Protocol[MadeRow]):
    """Reader that makes the rows of a record. A dataclass: its fields and the record determine the rows.

    It keeps its counts in the report, so that any process can read any part of a dataset.
    """

    kind: ClassVar[type]  # the kind of the rows

    def make(self, record: Record, report: DataReport) -> Iterable[MadeRow]:
        """Return the rows of one record, and count them in the report."""
        ...


EMPTY_PROMPT = "with an empty prompt"
EMPTY_RESPONSE = "with an empty response"
NO_ANSWER = "whose last message is not the assistant's"


def long_prompt(max_len: int, tokens: int) -> TooLong:
    """Return the exception for a row whose prompt leaves almost no room for the response."""
    return TooLong(long_prompt_reason(max_len), tokens=tokens)


def long_prompt_reason(max_len: int) -> str:
    return f"with a prompt of {max_len - 2} tokens or more (--max_len {max_len})"


def encode_response(marked: Marked, tokenizer: PreTrainedTokenizerBase, max_len: int, report: DataReport) -> Encoded:
    """Encode text and count it in the report; raise TooLong if its prompt leaves no room for the response."""
    encoded = encode(marked, tokenizer, max_len)
    if encoded.prompt_length >= max_len - 2:
        raise long_prompt(max_len, encoded.length)
    report.keep((encoded.text, encoded.length))
    report.without_eos += not encoded.learns_eos
    report.joined_prompts += encoded.joins_prompt
    return encoded


def build_rows(records: Records, make: Callable[[Record], Iterable[Row]], report: DataReport) -> list[Row]:
    """Collect the rows of all records in a list; raise an error if hardly any can be used."""
    report.read = len(records)
    hidden = len(records) < LARGE or not is_main_process()
    rows = make_rows(progress_bar(len(records), records, hidden=hidden), make, report)
    report.require_rows()
    return rows


def progress_bar(num_rows: int, records: Iterable[Record] | None = None, *, hidden: bool = False) -> tqdm[Record]:
    """Return a progress bar for reading rows, which wraps `records` if given; it is hidden outside a terminal."""
    hidden = hidden or not sys.stderr.isatty()
    return tqdm(records, desc="reading", unit=" rows", total=num_rows, disable=hidden, leave=False)


def make_rows(records: Iterable[Record], make: Callable[[Record], Iterable[Row]], report: DataReport) -> list[Row]:
    """Collect the rows that `make` returns for each record; count dropped records by reason."""
    rows: list[Row] = []
    for record in records:
        try:
            rows.extend(make(record))
        except Dropped as drop:
            report.dropped[str(drop)] += 1
            if isinstance(drop, TooLong):
                report.too_long.append(drop.tokens)
    return rows


def announce(loaded: Loaded[Row]) -> Loaded[Row]:
    """Print what a user should know about the rows, and return them."""
    for finding in loaded.report.all_findings():
        say(f"{loaded.report.name}: {finding}")
    return loaded
