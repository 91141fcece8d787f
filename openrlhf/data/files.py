"""Reader for local JSON and JSON Lines files.

Files are read in place instead of through `datasets`: error messages have exact line numbers, rows need not share a
schema, and nothing is copied into a cache.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from openrlhf.data.records import Place, describe
from openrlhf.errors import DataError


@dataclass(frozen=True)
class JsonRows:
    """The objects of a JSON array."""

    name: str
    rows: Sequence[object]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, position: int) -> tuple[Mapping[str, Any], int]:
        return an_object(self.rows[position], Place(self.name, position + 1)), position + 1


@dataclass(frozen=True)
class JsonLines:
    """One object per line; a line is parsed when its row is read."""

    name: str
    content: mmap.mmap
    lines: Sequence[tuple[int, int, int]]  # (line number, first byte, end)

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, position: int) -> tuple[Mapping[str, Any], int]:
        number, start, end = self.lines[position]
        try:
            row = json.loads(self.content[start:end])
        except ValueError as error:  # broken JSON, or bytes that are not UTF-8
            raise broken_json(self.name, error, number) from None
        return an_object(row, Place(self.name, number)), number


def open_json(name: str, path: Path, limit: int | None) -> JsonRows | JsonLines:
    """Open a .json or .jsonl file with an array of objects, or one object per line."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lines = find_lines(content, limit)
    if not lines:
        raise DataError(f"{name} is empty")
    _, start, end = lines[0]
    first = content[start:end].lstrip(b"\xef\xbb\xbf").strip()
    if first.startswith(b"[") or (first == b"{" and path.suffix == ".json"):
        return whole_json(name, content)
    return JsonLines(name, content, lines)


def find_lines(content: mmap.mmap, limit: int | None) -> list[tuple[int, int, int]]:
    """Locate the first `limit` lines that are not blank."""
    lines: list[tuple[int, int, int]] = []
    start = 0
    for number in count(1):
        if start >= len(content) or len(lines) == limit:
            return lines
        found = content.find(b"\n", start)
        end = found if found >= 0 else len(content)
        if content[start:end].strip():
            lines.append((number, start, end))
        start = end + 1
    raise AssertionError("count() does not end")


def whole_json(name: str, content: mmap.mmap) -> JsonRows:
    try:
        parsed = json.loads(content[:])
    except ValueError as error:
        raise broken_json(name, error) from None
    if parsed == []:
        raise DataError(f"{name} is empty")
    return JsonRows(name, parsed if isinstance(parsed, list) else [parsed])


def broken_json(name: str, error: ValueError, line: int | None = None) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        number = error.lineno if line is None else line
        return DataError(f"{name}, line {number}: broken JSON: {error.msg} at column {error.colno}")
    where = name if line is None else f"{name}, line {line}"
    return DataError(f"{where}: cannot be read: {error}")


def an_object(row: object, place: Place) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise place.error(f"an object with fields is wanted, but {describe(row)} came")
    return row
