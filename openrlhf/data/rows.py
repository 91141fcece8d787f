"""The loop that all dataset functions share: make rows, count and report the dropped ones, raise if none are left.

A command passes `build_rows` a function from one record to its rows. The function raises a DataError for data that is
wrong, which ends the run, and `Dropped` for a valid record that cannot be trained on, which is only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from openrlhf.data.records import Record, Records
from openrlhf.errors import DataError
from openrlhf.monitor import is_main_process, say

LARGE = 2000  # number of rows from which a progress bar is shown

Row = TypeVar("Row")


class Dropped(Exception):
    """Raised for a valid row that cannot be trained on; the reason completes the message '3 rows ...'."""


@dataclass(frozen=True)
class Loaded:
    """Rows of one kind.

    Labels of process reward models are soft (probabilities of the first reward token) or hard (class numbers: indices
    into the reward tokens, or vocabulary ids if no reward tokens are given), the same in all rows.
    """

    rows: Sequence[Any]
    soft_labels: bool = False


EMPTY_PROMPT = "with an empty prompt"
EMPTY_RESPONSE = "with an empty response"
NO_ANSWER = "whose last message is not the assistant's"


def long_prompt(max_len: int) -> Dropped:
    """Return the exception for a prompt that leaves room for less than two tokens of the response."""
    return Dropped(f"with a prompt of {max_len - 2} tokens or more (--max_len {max_len})")


def build_rows(records: Records, make: Callable[[Record], Iterable[Row]]) -> list[Row]:
    """Collect the rows that `make` returns for each record; dropped records are counted by reason and reported."""
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    hidden = len(records) < LARGE or not is_main_process()
    for record in tqdm(records, desc="reading", unit=" rows", total=len(records), disable=hidden, leave=False):
        try:
            rows.extend(make(record))
        except Dropped as drop:
            dropped[str(drop)] += 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    if not rows:
        raise DataError(f"{records.name}: no rows are left of {len(records)}: {reasons or 'the dataset is empty'}")
    if dropped:
        say(f"{records.name}: dropped {dropped.total()} of {len(records)} rows: {reasons}")
    return rows
