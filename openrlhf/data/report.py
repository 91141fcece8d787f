"""Report on the rows of a dataset: how many were dropped or truncated, and which look like a mistake.

Each module that makes rows fills in a `DataReport` and returns it with them. A run prints its findings; `openrlhf
preview` shows all of it. `findings` has the checks that a report contains.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from openrlhf.errors import DataError

LEAST_KEPT = 0.1  # fraction of the rows that must fit the budget
USUAL = 0.95  # fraction of the rows that fit the suggested budget
CHECKED = 100  # number of rows that are checked for lost text and misread fields
# Fields of a report that add up over the parts of a dataset.
SUMS = ("tokens_cut", "without_eos", "joined_prompts", "empty_sides", "split_conversations", "long_turns", "desirable")


@dataclass(frozen=True)
class Finding:
    """A likely mistake in data that can be used as it is, and a remedy if there is one."""

    problem: str
    try_this: str | None = None

    def __str__(self) -> str:
        return f"{self.problem}. Try: {self.try_this}" if self.try_this else self.problem


@dataclass(frozen=True)
class Budget:
    """The maximum tokens of a row (or of a prompt, to leave room for a response), and the flag that sets it."""

    tokens: int
    flag: str | None = "--prompt_max_len"  # None if no flag could raise it
    more: int = 0  # flag value - tokens: the tokens that the flag reserves for the response

    def for_rows(self, tokens: int) -> str:
        """Return the flag, with its value, that would allow rows of `tokens` tokens."""
        return f"{self.flag} {tokens + self.more}"

    def __str__(self) -> str:
        allowed = "" if self.flag is None else f" that {self.for_rows(self.tokens)} allows"
        return f"the {self.tokens} tokens{allowed}"


@dataclass
class DataReport:
    """The counts of one dataset, collected while its rows are made."""

    name: str  # name of the dataset
    budget: Budget
    read: int = 0  # records
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> records
    lengths: array[int] = field(default_factory=lambda: array("q"))  # tokens before truncation; for a pair, the maximum
    too_long: list[int] = field(default_factory=list)  # tokens of the records that were dropped as too long
    tokens_cut: int = 0
    cut_at: Literal["start", "end"] = "end"
    without_eos: int = 0  # rows without an EOS among their targets, not counting truncated rows
    joined_prompts: int = 0  # rows in which one token holds the end of the prompt and the start of the response
    empty_sides: int = 0  # pairs with a response without text
    split_conversations: int = 0  # conversations split into one row per turn
    long_turns: int = 0  # turns of split conversations that are omitted, because their context fills the budget
    desirable: int = 0  # rows with this label
    soft_labels: bool | None = None  # whether the labels of steps are soft; None until the first label is read
    texts: list[str] = field(default_factory=list)  # texts of the first rows, to check how they are tokenised
    findings: list[Finding] = field(default_factory=list)

    def keep(self, *sequences: tuple[str, int]) -> None:
        """Count a row that is used: the text of each of its sequences, and its tokens before truncation."""
        self.lengths.append(max(length for _, length in sequences))
        self.tokens_cut += sum(max(0, length - self.budget.tokens) for _, length in sequences)
        if len(self.texts) < CHECKED:
            self.texts += [text for text, _ in sequences]

    def part(self) -> DataReport:
        """Return an empty report for the next part of the dataset, which `merge` adds to this one."""
        return DataReport(self.name, self.budget, cut_at=self.cut_at, soft_labels=self.soft_labels)

    def merge(self, part: DataReport) -> None:
        """Add the report of the next part of the dataset; findings are made once, from the whole report."""
        for reason, count in part.dropped.items():  # in the order in which a single pass would find the reasons
            self.dropped[reason] += count
        self.lengths.extend(part.lengths)
        self.too_long += part.too_long
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        if self.soft_labels is None:
            self.soft_labels = part.soft_labels
        self.texts += part.texts[: max(0, CHECKED - len(self.texts))]

    def counts(self) -> dict[str, object]:
        """Return the counts that `merge` adds up, apart from the lengths, as JSON values."""
        names = ("dropped", "too_long", *SUMS, "soft_labels", "texts")
        return {name: getattr(self, name) for name in names}

    def with_counts(self, counts: dict[str, Any], lengths: bytes) -> DataReport:
        """Return the report of a part whose counts and lengths (as 64-bit integers) were stored."""
        part = self.part()
        for name, value in counts.items():
            setattr(part, name, Counter(value) if name == "dropped" else value)
        part.lengths.frombytes(lengths)
        return part

    def add(self, *found: Finding | None) -> None:
        """Add the findings of checks; None means that a check found nothing."""
        self.findings += [finding for finding in found if finding]

    @property
    def truncated(self) -> int:
        return int((np.asarray(self.lengths) > self.budget.tokens).sum())

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())

    def larger_budget(self) -> str | None:
        """Suggest a budget for 95% of the rows, or for all of them if 95% already fit."""
        needed = np.sort(np.asarray(self.lengths + array("q", self.too_long)))  # [rows]
        if self.budget.flag is None or not len(needed) or needed[-1] <= self.budget.tokens:
            return None
        usual, longest = int(needed[math.ceil(USUAL * len(needed)) - 1]), int(needed[-1])
        if self.budget.tokens < usual < longest:
            return f"{self.budget.for_rows(usual)}, which keeps {USUAL:.0%} of them whole"
        return f"{self.budget.for_rows(longest)}, which keeps all of them whole"

    def require_rows(self) -> None:
        """Raise if no row is left, or if hardly any fits the budget."""
        remedies = [self.larger_budget(), *(finding.try_this for finding in self.findings)]
        remedy = next((one for one in remedies if one), None)
        if not self.lengths:
            why = self.reasons or "the dataset is empty"
            raise DataError(f"{self.name}: 0 of {self.read} rows can be used: {why}", try_this=remedy)
        if self.read - len(self.too_long) < LEAST_KEPT * self.read:
            raise DataError(
                f"{self.name}: almost no rows would remain: {self.dropped.total()} of {self.read} are dropped:"
                f" {self.reasons}",
                try_this=remedy,
            )

    def all_findings(self) -> list[Finding]:
        """Return everything that a user should know, beginning with lost rows."""
        found: list[Finding] = []
        if self.dropped:
            problem = f"dropped {self.dropped.total()} of {self.read} rows: {self.reasons}"
            found.append(Finding(problem, self.larger_budget() if self.too_long else None))
        if self.truncated:
            problem = f"rows longer than {self.budget}: {self.truncated} of {len(self.lengths)}"
            found.append(
                Finding(f"{problem}; {self.tokens_cut:,} tokens are cut off at the {self.cut_at}", self.larger_budget())
            )
        return found + self.findings
