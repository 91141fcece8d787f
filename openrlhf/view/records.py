"""Read recorded samples. `SampleRecords` hides from the rest of the viewer how they are stored.

`rl/record.py` writes one JSON lines file per step. A file may be cut short or still growing, and a line may be broken:
only complete lines are read, and a broken one becomes None. A place is where a sample begins in its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from openrlhf.training.earlier_run import STEP_FILES
from openrlhf.view.metrics import finite

LARGEST = 2**53


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


class SampleRecords(Protocol):
    """The recorded samples of a run."""

    def files(self) -> list[RecordFile]:
        """List the files in the order of their steps."""
        ...

    def read(self, name: str, start: int = 0) -> Iterator[SampleRecord]:
        """Yield the complete records of a file from a place on; raise OSError if the file cannot be read."""
        ...

    def load(self, name: str, place: int) -> Sample | None:
        """Return the sample at a place; None if it is no longer there or cannot be read."""
        ...


class JsonlRecords:
    """Records as JSON lines: `rollouts/step_000001.jsonl`, one sample per line; a place is an offset in bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[RecordFile]:
        found = []
        for path in sorted(self.folder.glob(STEP_FILES)):
            try:
                status = path.stat()
            except FileNotFoundError:  # a new run has just moved it
                continue
            found.append(RecordFile(path.name, str(status.st_ino), status.st_size))
        return found

    def read(self, name: str, start: int = 0) -> Iterator[SampleRecord]:
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                place = start
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    yield SampleRecord(place, place + len(line), parse_sample(line))
                    place += len(line)
        except FileNotFoundError:
            return

    def load(self, name: str, place: int) -> Sample | None:
        try:
            return next((record.sample for record in self.read(name, place)), None)
        except OSError:
            return None


def parse_sample(line: bytes) -> Sample | None:
    """Return the sample of a line as `rl/record.py` writes it, or None if the line is broken."""
    try:
        row: dict[str, Any] = json.loads(line)
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
            ids=[int(token) for token in row["input_ids"][first:]],
            actions=mask[first:],
            advantages=numbers("advantages"),
            trainer=numbers("old_log_probs"),
            engine=numbers("rollout_log_probs"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _number(value: object) -> int:
    """Return an integer that SQLite and JavaScript can hold."""
    if not isinstance(value, int) or abs(value) > LARGEST:
        raise ValueError(f"expected an integer up to {LARGEST}, got {value!r:.40}")
    return value


def _text(value: object) -> str:
    """Return a string without lone surrogates, which JSON allows and UTF-8 does not."""
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
