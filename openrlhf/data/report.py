"""Report on the rows of a dataset: how many were dropped or truncated, and which look like a mistake.

Each module that makes rows fills in a `DataReport` and returns it with them. A run prints its `lines`; `openrlhf
preview` shows all of it. `findings` has the checks that a report contains.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from openrlhf.errors import DataError

LEAST_KEPT = 0.1  # fraction of the rows that must fit the budget
USUAL = 0.95  # fraction of the rows that fit the suggested budget
CHECKED = 100  # number of rows that are checked for lost text and misread fields


@dataclass(frozen=True)
class Finding:
    """Data that can be used but probably should not be, and a remedy if there is one."""

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
    lengths: list[int] = field(default_factory=list)  # tokens per row before truncation; for a pair, the longer one
    too_long: list[int] = field(default_factory=list)  # tokens of the records that were dropped as too long
    tokens_cut: int = 0
    cut_at: Literal["start", "end"] = "end"
    without_eos: int = 0  # rows without an EOS among their targets, not counting truncated rows
    texts: list[str] = field(default_factory=list)  # texts of the first rows, to check how they are tokenised
    findings: list[Finding] = field(default_factory=list)

    def keep(self, *sequences: tuple[str, int]) -> None:
        """Count a row that is used: the text of each of its sequences, and its tokens before truncation."""
        self.lengths.append(max(length for _, length in sequences))
        self.tokens_cut += sum(max(0, length - self.budget.tokens) for _, length in sequences)
        if len(self.texts) < CHECKED:
            self.texts += [text for text, _ in sequences]

    def add(self, *found: Finding | None) -> None:
        """Add the findings of checks; None means that a check found nothing."""
        self.findings += [finding for finding in found if finding]

    @property
    def truncated(self) -> int:
        return sum(length > self.budget.tokens for length in self.lengths)

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())

    def larger_budget(self) -> str | None:
        """Suggest a budget for 95% of the rows, or for all of them if 95% already fit."""
        needed = sorted([*self.lengths, *self.too_long])
        if self.budget.flag is None or not needed or needed[-1] <= self.budget.tokens:
            return None
        usual = needed[math.ceil(USUAL * len(needed)) - 1]
        if self.budget.tokens < usual < needed[-1]:
            return f"{self.budget.for_rows(usual)}, which keeps {USUAL:.0%} of them whole"
        return f"{self.budget.for_rows(needed[-1])}, which keeps all of them whole"

    def require_rows(self) -> None:
        """Raise if no row is left, or if hardly any fits the budget."""
        remedies = [self.larger_budget(), *(finding.try_this for finding in self.findings)]
        remedy = next((one for one in remedies if one), None)
        if not self.lengths:
            why = self.reasons or "the dataset is empty"
            raise DataError(f"{self.name}: no row out of {self.read} can be used: {why}", try_this=remedy)
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

    def lines(self) -> list[str]:
        """Return the findings as messages of a run."""
        return [f"{self.name}: {finding}" for finding in self.all_findings()]
