"""Reader for local JSON and JSON Lines files.

Files are read directly instead of with `datasets`, so that error messages have exact line numbers, rows need not share
a schema, and nothing is copied into a cache. `open_json` returns one of the two `Source`s below. Files with either
suffix may contain an array or one object per line; the first line shows which.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.data.json_text import InvalidJSON, parse_json
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


@dataclass(frozen=True)
class JsonLines:
    """One object per line. Only line boundaries are stored; a line is parsed each time its row is read."""

    name: str
    content: mmap.mmap
    lines: Sequence[tuple[int, int, int]]  # (line number, first byte, end)

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, position: int) -> tuple[object, int]:
        """Return the parsed object of one line, and its line number, which also counts blank lines."""
        number, start, end = self.lines[position]
        try:
            return parse_json(self.content[start:end]), number
        except InvalidJSON as error:
            raise broken_json(self.name, error, number) from None


def open_json(name: str, path: Path, limit: int | None) -> JsonArray | JsonLines:
    """Open a .json or .jsonl file with an array of objects, or one object per line (the first `limit` of them)."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lines = find_lines(content, limit)
    if not lines:
        raise DataError(f"{name} is empty")
    _, start, end = lines[0]
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


def find_lines(content: mmap.mmap, limit: int | None) -> list[tuple[int, int, int]]:
    """Locate the first `limit` lines that are not blank: (line number, first byte, end)."""
    lines: list[tuple[int, int, int]] = []
    number, start = 1, 0
    while start < len(content) and len(lines) != limit:
        found = content.find(b"\n", start)
        end = found if found >= 0 else len(content)
        if content[start:end].strip():
            lines.append((number, start, end))
        number, start = number + 1, end + 1
    return lines


def broken_json(name: str, error: InvalidJSON, line: int | None = None) -> DataError:
    """Return an error about broken JSON or unusable values; `line` is the line number in a JSON Lines file."""
    number = error.line if line is None else line
    where = name if number is None else f"{name}, line {number}"
    if error.column is not None:
        return DataError(f"{where}: broken JSON: {error.problem} at column {error.column}")
    return DataError(f"{where}: cannot be read: {error.problem}")
