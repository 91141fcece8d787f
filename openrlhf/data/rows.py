"""The loop that every dataset function shares: make rows, count what is dropped, say so, never return nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from tqdm import tqdm

from openrlhf.data.records import Record, Records
from openrlhf.errors import DataError
from openrlhf.monitor import is_main_process, say

LARGE = 2000  # from here on a progress bar is worth showing

Row = TypeVar("Row")


class Dropped(Exception):
    """A row that cannot be trained on though nothing is wrong with it; the reason completes '3 rows ...'."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def long_prompt(max_len: int) -> Dropped:
    return Dropped(f"with a prompt of {max_len - 2} tokens or more (--max_len {max_len})")


def build_rows(records: Records, make: Callable[[Record], Iterable[Row]]) -> list[Row]:
    """The rows that `make` gives for each record; those that it drops are counted by reason."""
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    hidden = len(records) < LARGE or not is_main_process()
    for record in tqdm(records, desc="reading", unit=" rows", total=len(records), disable=hidden, leave=False):
        try:
            rows.extend(make(record))
        except Dropped as drop:
            dropped[drop.reason] += 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    if not rows:
        raise DataError(f"{records.name}: no row is left of {len(records)}: {reasons or 'it holds none'}")
    if dropped:
        say(f"{records.name}: dropped {dropped.total()} of {len(records)} rows: {reasons}")
    return rows
