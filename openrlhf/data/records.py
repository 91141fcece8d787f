"""Rows of a dataset that know where they stand, so that a complaint names file, row and field."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.errors import DataError

if TYPE_CHECKING:  # workers that run user code import this module and start faster without numpy
    import numpy as np
    from numpy.typing import NDArray

MOST_ADVISED = 3  # fields that a message advises to take instead of a missing one


@dataclass(frozen=True)
class Place:
    """A file or dataset and the 1-based number of a row in it; in JSON Lines the number of the line."""

    source: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}"

    def error(self, problem: str, field: str | None = None) -> DataError:
        where = str(self) if field is None else f"{self}, field {field!r}"
        return DataError(f"{where}: {problem}")


def describe(value: object) -> str:
    """What came instead of what was wanted, short enough for one line."""
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
        """What stands in the field that a flag names; where it is missing, the error names those that are there."""
        if field not in self.row:
            there = list(self.row)
            raise DataError(
                f"{self.place}: no field {field!r}; there are {', '.join(map(repr, there)) or 'none'}",
                try_this=f"{flag} {' or '.join(map(shlex.quote, there[:MOST_ADVISED]))}" if there else None,
            )
        return self.row[field]

    def text(self, field: str, flag: str) -> str:
        """Text in the field that a flag names; null reads as empty, which the caller drops and counts."""
        value = self.value(field, flag)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.place.error(f"text is wanted, but {describe(value)} came", field)
        return value

    def number(self, field: str, default: float) -> float:
        """A finite number in a field; the default where the field is missing or null."""
        value = self.row.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.place.error(f"a number is wanted, but {describe(value)} came", field)
        return float(value)


class Source(Protocol):
    """One dataset: rows by position, each with the number under which a person finds it."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, position: int) -> tuple[Mapping[str, Any], int]: ...


@dataclass(frozen=True)
class Records:
    """Rows of one or several sources in the order of training; read when asked for."""

    sources: Sequence[Source]
    order: NDArray[np.int64]  # [rows, 2]: which source, and which of its rows

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
