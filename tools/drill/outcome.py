"""The result of a drill, and the table of all drills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

Case = TypeVar("Case")


class Lost(Exception):
    """A case that did not survive; the message says why."""


@dataclass
class Outcome:
    """How many cases a drill tried, and the reason for each one that was lost."""

    tried: int = 0
    losses: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return len(self.losses)

    @property
    def survived(self) -> int:
        return self.tried - self.lost


def try_all(cases: Mapping[str, Case], drill: Callable[[Case], None], at_a_time: int = 1) -> Outcome:
    """Try each case, by name; a case is lost if `drill` raises Lost or any other error."""

    def reason(name: str) -> str | None:
        try:
            drill(cases[name])
        except Exception as error:  # noqa: BLE001  a drill reports any failure and continues
            kind = "" if isinstance(error, Lost) else f"{type(error).__name__}: "
            return f"{name}: {kind}{error}"
        return None

    with ThreadPoolExecutor(at_a_time) as pool:
        reasons = list(pool.map(reason, cases))
    return Outcome(len(cases), [reason for reason in reasons if reason is not None])


def render_table(rows: Iterable[tuple[str, Outcome, float]]) -> str:
    """Return the table as Markdown: a row per drill with its duration, and a row of totals."""
    rows = list(rows)
    total = Outcome(sum(row.tried for _, row, _ in rows), [loss for _, row, _ in rows for loss in row.losses])
    lines = ["| drill | tried | survived | lost | minutes |", "|---|---:|---:|---:|---:|"]
    for name, row, seconds in [*rows, ("**all**", total, sum(seconds for _, _, seconds in rows))]:
        lines.append(f"| {name} | {row.tried} | {row.survived} | {row.lost} | {seconds / 60:.1f} |")
    return "\n".join(lines)
