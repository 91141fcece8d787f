"""The loop that builds all rows of a dataset, reports dropped rows, and raises an error if none are left.

`build_rows` takes a function that makes the rows of one record. The function raises a DataError for invalid data, which
ends the run, and `Dropped` for a valid record that cannot be trained on, which is counted and reported.
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

LARGE = 2000  # minimum number of rows for a progress bar

Row = TypeVar("Row")


class Dropped(Exception):
    """Raised for a valid row that cannot be trained on; the message completes "3 rows ..."."""


@dataclass(frozen=True)
class Loaded:
    """Rows of one kind.

    The labels of process reward models are either all soft (the probability of the first reward token) or all hard (an
    index into the reward tokens, or a vocabulary id if no reward tokens are given).
    """

    rows: Sequence[Any]
    soft_labels: bool = False


EMPTY_PROMPT = "with an empty prompt"
EMPTY_RESPONSE = "with an empty response"
NO_ANSWER = "whose last message is not the assistant's"


def long_prompt(max_len: int) -> Dropped:
    """Return the exception for a prompt that leaves almost no room for the response."""
    return Dropped(f"with a prompt of {max_len - 2} tokens or more (--max_len {max_len})")


def build_rows(records: Records, make: Callable[[Record], Iterable[Row]]) -> list[Row]:
    """Collect the rows that `make` returns for each record; report dropped records by reason."""
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
        why = reasons or "the dataset is empty"
        raise DataError(f"{records.name}: no row out of {len(records)} can be used: {why}")
    if dropped:
        say(f"{records.name}: dropped {dropped.total()} of {len(records)} rows: {reasons}")
    return rows
