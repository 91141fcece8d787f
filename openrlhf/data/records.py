"""Rows of a dataset that know their origin, so that error messages can name file, row and field."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.errors import DataError

if TYPE_CHECKING:  # user-code workers import this module; they start faster without numpy
    import numpy as np
    from numpy.typing import NDArray

MOST_ADVISED = 3  # fields that a message suggests in place of a missing one


@dataclass(frozen=True)
class Place:
    """A file or dataset and the 1-based number of a row in it; for JSON Lines, the line number."""

    source: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}"

    def error(self, problem: str, field: str | None = None) -> DataError:
        where = str(self) if field is None else f"{self}, field {field!r}"
        return DataError(f"{where}: {problem}")


def describe(value: object) -> str:
    """Describe an unexpected value for an error message, short enough for one line."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {value[:40]!r}" + ("..." if len(value) > 40 else "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Record:
    """One row and its place."""

    row: Mapping[str, Any]
    place: Place

    def value(self, field: str, flag: str) -> Any:
        """Return the value of the field that a flag names; if it is missing, the error lists the existing fields."""
        if field not in self.row:
            there = list(self.row)
            raise DataError(
                f"{self.place}: no field {field!r}; there are {', '.join(map(repr, there)) or 'none'}",
                try_this=f"{flag} {' or '.join(map(shlex.quote, there[:MOST_ADVISED]))}" if there else None,
            )
        return self.row[field]

    def text(self, field: str, flag: str) -> str:
        """Return the text in the field that a flag names; null becomes empty, and callers drop and count empty rows."""
        value = self.value(field, flag)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.place.error(f"text is wanted, but {describe(value)} came", field)
        return value

    def number(self, field: str, default: float) -> float:
        """Return the finite number in a field, or the default if the field is missing or null."""
        value = self.row.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.place.error(f"a number is wanted, but {describe(value)} came", field)
        return float(value)


class Source(Protocol):
    """One dataset: `read` returns a row by position, with the row or line number that a user would look up."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, position: int) -> tuple[Mapping[str, Any], int]: ...


@dataclass(frozen=True)
class Records:
    """Rows of one or several sources in training order; each is read on access."""

    sources: Sequence[Source]
    order: NDArray[np.int64]  # [rows, 2]: (source, position in it)

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Record:
        which, inside = self.order[position]
        source = self.sources[which]
        row, number = source.read(int(inside))
        return Record(row, Place(source.name, number))

    def __iter__(self) -> Iterator[Record]:
        return (self[position] for position in range(len(self)))
