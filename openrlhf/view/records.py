"""Read recorded samples. `SampleRecords` hides the storage format from the rest of the viewer.

`rl/record.py` writes one Parquet file per step, which is complete once it has its name. Versions before 1.1 wrote JSON
lines. Such a file may be cut off, and a line may be broken: only complete lines are read, and a broken line becomes
None. A place is the position of a sample in its file.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from openrlhf.training.earlier_run import step_files
from openrlhf.view.metrics import finite

LARGEST = 2**53
TOKENS = range(2**31)  # ids that a tokenizer may have
ROWS_AT_ONCE = 64  # number of Parquet rows to convert to Python objects together
COLUMNS = [  # the columns to show
    *("step", "prompt", "response", "reward", "score", "truncated", "version", "extra_logs"),
    *("input_ids", "action_mask", "advantages", "old_log_probs", "rollout_log_probs"),
]
BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # raised by broken records


@dataclass(frozen=True)
class Sample:
    """A recorded sample; the sequences have one entry per token from the first action token on.

    `advantages`, `trainer` and `engine` are None if they were not recorded. The last two are log-probs of the sampled
    tokens: of the policy before training on them, and of the engine that sampled them.
    """

    step: int
    prompt_index: int
    prompt: str
    label: str
    response: str
    reward: float | None
    score: float | None
    truncated: bool
    version: int
    extra: Mapping[str, float | None]
    ids: Sequence[int]
    actions: Sequence[bool]  # True for the policy's tokens, False for those of the environment
    advantages: Sequence[float | None] | None
    trainer: Sequence[float | None] | None
    engine: Sequence[float | None] | None

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.actions)

    @property
    def turns(self) -> int:
        return sum(later and not earlier for earlier, later in pairwise([False, *self.actions]))


@dataclass(frozen=True)
class RecordFile:
    """A file of samples; `version` changes when it is replaced, and `size` when it grows."""

    name: str
    version: str
    size: int


@dataclass(frozen=True)
class SampleRecord:
    """A place in a file, and the sample there; None if it cannot be read."""

    place: int
    end: int
    sample: Sample | None


class SampleRecords:
    """The recorded samples of a run: `rollouts/step_000001.parquet`, or `.jsonl` in older runs.

    A place is the number of a row in Parquet, and an offset in bytes in JSON lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[RecordFile]:
        """List the files in the order of their steps."""
        found = []
        for path in step_files(self.folder):
            try:
                status = path.stat()
            except OSError:  # a new run has just moved it, or it is a link that leads nowhere
                continue
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode):  # reading it would block, or never end
                continue
            found.append(RecordFile(path.name, str(status.st_ino), status.st_size))
        return found

    def read(self, name: str, start: int = 0) -> Iterator[SampleRecord]:
        """Yield the complete records of a file, starting at a place; raise OSError if the file cannot be read."""
        path = self.folder / name
        with suppress(FileNotFoundError):
            yield from read_parquet(path, start) if path.suffix == ".parquet" else read_lines(path, start)

    def load(self, name: str, place: int) -> Sample | None:
        """Return the sample at a place; None if it is no longer there or cannot be read."""
        try:
            return next((record.sample for record in self.read(name, place)), None)
        except OSError:
            return None


def read_lines(path: Path, start: int) -> Iterator[SampleRecord]:
    """Yield the complete lines of a file, starting at an offset."""
    with path.open("rb") as file:
        file.seek(start)
        place = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield SampleRecord(place, place + len(line), parse_sample(line))
            place += len(line)


def read_parquet(path: Path, start: int) -> Iterator[SampleRecord]:
    """Yield the rows of a file, starting at a row number; the last row ends at the size of the file."""
    try:
        with path.open("rb") as opened, ParquetFile(opened) as file:
            count, size, first = file.metadata.num_rows, path.stat().st_size, 0
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows <= start:
                    first += rows
                    continue
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    skipped = min(max(0, start - first), len(batch))
                    for place, row in enumerate(batch.slice(skipped).to_pylist(), first + skipped):
                        yield SampleRecord(place, size if place == count - 1 else place + 1, parse_row(row))
                    first += len(batch)
    except ArrowException as error:
        raise OSError(f"{path.name} cannot be read: {error}") from error


def parse_row(row: dict[str, Any]) -> Sample | None:
    """Return the sample of a row of a Parquet file, or None if the row is broken."""
    try:
        prompt = row["prompt"] | {"label": json.loads(row["prompt"]["label"])}
        return make_sample(row | {"prompt": prompt, "extra_logs": json.loads(row["extra_logs"])})
    except BROKEN:
        return None


def parse_sample(line: bytes) -> Sample | None:
    """Return the sample of a line as older versions wrote it, or None if the line is broken."""
    try:
        return make_sample(json.loads(line))
    except BROKEN:
        return None


def make_sample(row: Mapping[str, Any]) -> Sample:
    """Return the sample of a row."""
    mask = [bool(acts) for acts in row["action_mask"]]
    first = mask.index(True) if any(mask) else len(mask)

    def numbers(name: str) -> list[float | None] | None:
        values = row.get(name)
        return [finite(value) for value in values[first:]] if values else None

    prompt, label = row["prompt"], row["prompt"].get("label", "")
    return Sample(
        step=_number(row["step"]),
        prompt_index=_number(prompt["index"]),
        prompt=_text(prompt["text"]),
        label=_text(label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)),
        response=_text(row.get("response", "")),
        reward=finite(row["reward"]),
        score=finite(row["score"]),
        truncated=bool(row["truncated"]),
        version=_number(row["version"]),
        extra={str(name): finite(value) for name, value in row.get("extra_logs", {}).items()},
        ids=[_token(token) for token in row["input_ids"][first:]],
        actions=mask[first:],
        advantages=numbers("advantages"),
        trainer=numbers("old_log_probs"),
        engine=numbers("rollout_log_probs"),
    )


def _number(value: object) -> int:
    """Return an integer that SQLite and JavaScript can hold."""
    if not isinstance(value, int) or abs(value) > LARGEST:
        raise ValueError(f"expected an integer up to {LARGEST}, got {value!r:.40}")
    return value


def _token(value: object) -> int:
    if not isinstance(value, int) or value not in TOKENS:
        raise ValueError(f"expected the id of a token, got {value!r:.40}")
    return value


def _text(value: object) -> str:
    """Return a string without lone surrogates, which JSON allows and UTF-8 does not."""
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
