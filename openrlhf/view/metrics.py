"""Read metrics.jsonl piece by piece: each call returns the lines that were added since the previous one.

The reader keeps no state: the caller passes the position where it stopped. A file that was replaced, as by a resumed
run, is read again from the start.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 4 << 20  # maximum per call; the caller repeats the call until nothing is left


@dataclass(frozen=True)
class Position:
    """A position in a file; `file` distinguishes it from another file of the same name."""

    file: str = ""  # a string, because inode numbers exceed the integers of JavaScript
    offset: int = 0


START = Position()


@dataclass(frozen=True)
class Points:
    """New points of one curve; a value that is not finite is None."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class NewMetrics:
    """New points by curve, which is named `train/reward` or `eval/eval_default_reward`."""

    curves: Mapping[str, Points]
    position: Position
    restarted: bool  # the file was replaced: forget earlier points
    more: bool  # there is more to read
    unreadable: int = 0  # lines that are not metrics


def read_metrics(path: Path, since: Position = START) -> NewMetrics:
    """Return the metrics after a position. An incomplete last line is left for the next call."""
    if path.exists() and not path.is_file():  # a pipe would block
        return NewMetrics({}, since, restarted=False, more=False)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            name, size = str(status.st_ino), status.st_size
            restarted = name != since.file or size < since.offset
            start = 0 if restarted else since.offset
            file.seek(start)
            data = file.read(MOST_BYTES)
            if b"\n" not in data:  # a line longer than MOST_BYTES, or an incomplete line
                data += file.readline()
    except FileNotFoundError:
        return NewMetrics({}, Position(), restarted=since.offset > 0, more=False)
    except OSError:  # for example, a network file system does not answer: keep the earlier points and try again
        return NewMetrics({}, since, restarted=False, more=False)
    complete = data[: data.rfind(b"\n") + 1]
    curves: dict[str, Points] = {}
    unreadable = sum(not _add_line(curves, line) for line in complete.splitlines())
    end = Position(name, start + len(complete))
    return NewMetrics(curves, end, restarted, more=bool(complete) and end.offset < size, unreadable=unreadable)


def _add_line(curves: dict[str, Points], line: bytes) -> bool:
    """Add the values of a line to the curves; return False if the line is not readable."""
    try:
        row = json.loads(line)
        kind, step = str(row.pop("kind")), int(row.pop("step"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return False
    for name, value in row.items():
        if isinstance(value, int | float):  # booleans too: 0 or 1
            points = curves.setdefault(f"{kind}/{name}", Points())
            points.steps.append(step)
            points.values.append(finite(value))
    return True


def finite(value: float) -> float | None:
    """Return the value, or None for NaN, infinities and integers beyond floats, which JSON cannot represent."""
    return float(value) if abs(value) <= sys.float_info.max else None  # no comparison holds for NaN
