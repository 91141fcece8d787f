"""Dataset rows with their origin, so that error messages can name file, row and field.

`sources.load_dataset_rows` returns `Records`: the rows of one or several datasets in training order, each read from its
`Source` on access. A row is a `Record`, whose methods check the type of a field before returning it. The modules that
make training rows (`sft`, `preference`, `process`, `prompts`, `answers`) only use records.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from openrlhf.errors import DataError

if TYPE_CHECKING:  # workers for user code import this module and start faster without numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_SUGGESTED_FIELDS = 3  # number of fields to suggest for a missing one


@dataclass(frozen=True)
class Place:
    """The origin of a row or of one of its fields, for error messages: `data.jsonl, row 3, field 'label'`."""

    source: str  # file or dataset
    row: int  # starting at 1; for JSON Lines, the line number
    field: str | None = None

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}" + ("" if self.field is None else f", field {self.field!r}")

    def error(self, problem: str, *, try_this: str | None = None) -> DataError:
        """Return an error that names this location."""
        return DataError(f"{self}: {problem}", try_this=try_this)

    def mismatch(self, expected: str, got: object, *, try_this: str | None = None) -> DataError:
        """Return an error about a value of the wrong kind."""
        return self.error(f"expected {expected}, got {describe(got)}", try_this=try_this)


def describe(value: object) -> str:
    """Describe an unexpected value in a short phrase for an error message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {value[:40]!r}" + ("..." if len(value) > 40 else "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value)) or "no keys"
        return f"an object with {keys[:200]}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Record:
    """One row and its location. Lookups take the flag that names the field, for the error message."""

    row: Mapping[str, object]
    place: Place

    def at(self, field: str) -> Place:
        """Return the location of a field."""
        return replace(self.place, field=field)

    def value(self, field: str, flag: str) -> object:
        """Return the value of the field that a flag names; if it is missing, the error lists the existing fields."""
        if field not in self.row:
            existing = list(self.row)
            suggested = " or ".join(map(shlex.quote, existing[:MAX_SUGGESTED_FIELDS]))
            raise DataError(
                f"{self.place}: no field {field!r}; the row has {', '.join(map(repr, existing)) or 'none'}",
                try_this=f"{flag} {suggested}" if existing else None,
            )
        return self.row[field]

    def text(self, field: str, flag: str) -> str:
        """Return the text of the field that a flag names; null becomes empty text."""
        value = self.value(field, flag)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.at(field).mismatch("text", value)
        return value

    def number(self, field: str, default: float) -> float:
        """Return the finite number in a field, or the default if the field is missing or null."""
        value = self.row.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(as_float(value)):
            raise self.at(field).mismatch("a number", value)
        return float(value)


def as_float(value: float) -> float:
    """Convert a number; an integer beyond the range of floats becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Source(Protocol):
    """One dataset: a JSON file (`files`) or an Arrow table (`sources`)."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, position: int) -> tuple[object, int]:
        """Return the row at a position, and its row or line number for error messages."""
        ...

    def read_many(self, positions: Sequence[int]) -> Sequence[tuple[object, int]]:
        """Return what `read` returns for each position, faster if the rows are in a table."""
        ...

    def digest(self, rows: int) -> str | None:
        """Return a hash of everything that `read` returns for the first rows, or None if there is no exact one."""
        ...


@dataclass(frozen=True)
class Records:
    """Rows of one or several sources in training order; each is read on access."""

    sources: Sequence[Source]
    order: NDArray[np.int64]  # [rows, 2]: (source, position in it)
    held_out: bool = False  # taken from the training data for evaluation

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources) + (" (held out)" if self.held_out else "")

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Record:
        number, inside = self.order[position]
        source = self.sources[number]
        return as_record(source, *source.read(int(inside)))

    def __iter__(self) -> Iterator[Record]:
        return (self[position] for position in range(len(self)))

    def rows_used(self, number: int) -> int:
        """Return how many rows of a source are in use, counted up to the last one of them."""
        return int(self.order[self.order[:, 0] == number, 1].max(initial=-1)) + 1

    def part(self, begin: int, end: int) -> Records:
        """Return the records from `begin` to `end`."""
        return replace(self, order=self.order[begin:end])

    def read_all(self) -> list[Record]:
        """Read all records, source by source; if several are invalid, the error may be about any of them."""
        found: dict[tuple[int, int], Record] = {}
        for number in set(self.order[:, 0].tolist()):
            source, positions = self.sources[number], self.order[self.order[:, 0] == number, 1].tolist()
            for position, (row, row_number) in zip(positions, source.read_many(positions), strict=True):
                found[number, position] = as_record(source, row, row_number)
        return [found[number, position] for number, position in self.order.tolist()]


def as_record(source: Source, row: object, row_number: int) -> Record:
    """Return a row of a source with its location; raise an error if it has no fields."""
    place = Place(source.name, row_number)
    if not isinstance(row, Mapping):
        raise place.mismatch("an object with fields", row)
    return Record(row, place)
