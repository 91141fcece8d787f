"""Findings of the doctor: one line each about this machine, with a fix if something is wrong."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report.

    A note is worth knowing, a warning matters for some runs, and `broken` means that no run works. The last two come
    with a fix.
    """

    area: str
    subject: str
    value: str
    status: Status = "ok"
    fix: str = ""


def size(number: float) -> str:
    """Format a number of bytes."""
    return f"{number / 2**30:.1f} GiB"
