"""Reader for local JSON and JSON Lines files.

Files are read directly instead of with `datasets`, so that error messages have exact line numbers, rows need not share
a schema, and nothing is copied into a cache. `open_json` returns one of the two `Source`s below. Files with either
suffix may contain an array or one object per line; the first line shows which.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openrlhf.data.json_text import InvalidJSON, exact_json, parse_json
from openrlhf.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonArray:
    """The items of a JSON array; the whole file is parsed when it is opened."""

    name: str
    items: Sequence[object]

    def __len__(self) -> int:
        return len(self.items)

    def read(self, position: int) -> tuple[object, int]:
        return self.items[position], position + 1

    def read_many(self, positions: Sequence[int]) -> list[tuple[object, int]]:
        return [self.read(position) for position in positions]

    def digest(self, rows: int) -> str | None:
        """Return a hash of the first items, or None if they contain objects of a caller that have no exact text."""
        found = hashlib.sha256()
        for item in self.items[:rows]:
            text = exact_json(item)
            if text is None:
                return None
            found.update(text.encode() + b"\n")
        return found.hexdigest()


@dataclass(frozen=True)
class JsonLines:
    """One object per line. Only line boundaries are stored; a line is parsed each time its row is read."""

    name: str
    content: mmap.mmap
    lines: NDArray[np.int64]  # [rows, 3]: (line number, first byte, end)

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, position: int) -> tuple[object, int]:
        """Return the parsed object of one line, and its line number, which also counts blank lines."""
        number, start, end = self.lines[position].tolist()
        try:
            return parse_json(self.content[start:end]), number
        except InvalidJSON as error:
            raise broken_json(self.name, error, number) from None

    def read_many(self, positions: Sequence[int]) -> list[tuple[object, int]]:
        return [self.read(position) for position in positions]

    def digest(self, rows: int) -> str:
        """Return a hash of the file up to the end of a row."""
        end = int(self.lines[rows - 1, 2]) if rows else 0
        with memoryview(self.content) as content, content[:end] as used:
            return hashlib.sha256(used).hexdigest()


def open_json(name: str, path: Path, limit: int | None) -> JsonArray | JsonLines:
    """Open a .json or .jsonl file with an array of objects, or one object per line (the first `limit` of them)."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lines = find_lines(content, limit)
    if not len(lines):
        raise DataError(f"{name} is empty")
    _, start, end = lines[0].tolist()
    first = content[start:end].lstrip(BYTE_ORDER_MARK).strip()
    # In a .json file, a line with only "{" starts a single object that spans several lines.
    if not first.startswith(b"[") and not (first == b"{" and path.suffix == ".json"):
        return JsonLines(name, content, lines)
    try:
        parsed = parse_json(content[:])
    except InvalidJSON as error:
        raise broken_json(name, error) from None
    if parsed == []:
        raise DataError(f"{name} is empty")
    return JsonArray(name, parsed if isinstance(parsed, list) else [parsed])


def find_lines(content: mmap.mmap, limit: int | None) -> NDArray[np.int64]:
    """Locate the first `limit` lines that are not blank, [rows, 3]: (line number, first byte, end)."""
    lines, found = array("q"), 0  # 24 bytes per row; tuples would take ten times as much
    number, start = 1, 0
    while start < len(content) and found != limit:
        newline = content.find(b"\n", start)
        end = newline if newline >= 0 else len(content)
        if content[start:end].strip():
            lines.extend((number, start, end))
            found += 1
        number, start = number + 1, end + 1
    return np.frombuffer(lines, dtype=np.int64).reshape(-1, 3)


def broken_json(name: str, error: InvalidJSON, line: int | None = None) -> DataError:
    """Return an error about broken JSON or unusable values; `line` is the line number in a JSON Lines file."""
    number = error.line if line is None else line
    where = name if number is None else f"{name}, line {number}"
    if error.column is not None:
        return DataError(f"{where}: broken JSON: {error.problem} at column {error.column}")
    return DataError(f"{where}: cannot be read: {error.problem}")
