"""The runs of a page: the list of them, an index of their samples, and the samples of a prompt with their tokens.

`Viewer` answers a server's requests, from files that may still grow. The report also uses `shown_sample` and `to_json`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openrlhf.errors import ConfigError
from openrlhf.monitor import say
from openrlhf.view.records import Sample, SampleRecords
from openrlhf.view.runs import RunFolder, find_runs
from openrlhf.view.sample_index import SampleIndex
from openrlhf.view.token_texts import TokenTexts

MOST_SIDE_BY_SIDE = 32  # samples of one prompt that are shown together


@dataclass(frozen=True)
class ShownRun:
    """A run in the list of runs. Its id is its place in the list, and never changes."""

    id: int
    name: str
    folder: str
    samples: int  # samples indexed so far


@dataclass(frozen=True)
class ShownSample:
    """A sample with the text of each of its tokens; `texts` is None if the tokenizer is not on this machine."""

    id: int
    length: int
    turns: int
    texts: list[str] | None
    sample: Sample


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt in one step, or some of them if there are many."""

    samples: Sequence[ShownSample]
    total: int


def shown_sample(number: int, sample: Sample, tokens: TokenTexts) -> ShownSample:
    return ShownSample(number, sample.length, sample.turns, tokens.decode(sample.ids), sample)


def to_json(value: object) -> bytes:
    """Return ASCII JSON for the page's scripts; dataclasses become objects, and every number must be finite."""
    return json.dumps(value, default=_fields, allow_nan=False, separators=(",", ":")).encode("ascii")


def _fields(value: object) -> object:
    if isinstance(value, ShownSample):  # flat, as the scripts read it
        own = {"id": value.id, "length": value.length, "turns": value.turns, "texts": value.texts}
        return own | vars(value.sample)
    return vars(value)  # unlike `asdict`, it does not copy every token


class Viewer:
    """The runs below some folders, kept up to date.

    Any thread may query it; one thread at a time looks for new runs and new samples.
    """

    def __init__(self, folders: Sequence[str], workspace: Path) -> None:
        self.folders = folders
        self.index = SampleIndex(workspace / "samples.sqlite")
        self.found: list[RunFolder] = find_runs(folders)
        self.tokens: dict[Path, TokenTexts] = {}
        self.loading = threading.Lock()
        self.problems: set[str] = set()  # problems that were printed

    def find_new_runs(self) -> None:
        """Search the folders again, which takes a while if they are large."""
        known = {run.folder for run in self.found}
        with suppress(ConfigError, OSError):  # the folders were moved or deleted; known runs can still be shown
            self.found += [run for run in find_runs(self.folders) if run.folder not in known]

    def update(self) -> int:
        """Index new samples of the known runs; return the number of records read. Print each problem once."""
        count = 0
        for number, run in enumerate(self.found):
            try:
                count += self.index.update(number, SampleRecords(run.rollouts))
            except (OSError, sqlite3.Error) as error:  # an unreadable file, or a full disk
                problem = f"{run.name}: some samples are not shown: {error}"
                if problem not in self.problems:
                    say(problem)
                self.problems.add(problem)
        return count

    def run(self, number: int) -> RunFolder:
        """Return a run by its id; raise KeyError for an unknown one."""
        if not 0 <= number < len(self.found):
            raise KeyError(number)
        return self.found[number]

    def runs(self) -> list[ShownRun]:
        counts = self.index.counts()
        return [
            ShownRun(number, run.name, str(run.folder), counts.get(number, 0)) for number, run in enumerate(self.found)
        ]

    def group(self, sample: int) -> PromptSamples:
        """Return the group of a sample; empty if its record is gone."""
        places = self.index.group_of(sample)
        # If there are too many, show those around the one that was asked for.
        own = next((rank for rank, place in enumerate(places) if place.id == sample), 0)
        start = max(0, min(own - MOST_SIDE_BY_SIDE // 2, len(places) - MOST_SIDE_BY_SIDE))
        shown = []
        for place in places[start : start + MOST_SIDE_BY_SIDE]:
            run = self.run(place.run)
            loaded = SampleRecords(run.rollouts).load(place.file, place.place)
            if loaded is not None:
                shown.append(shown_sample(place.id, loaded, self._tokens_of(run)))
        return PromptSamples(shown, len(places))

    def _tokens_of(self, run: RunFolder) -> TokenTexts:
        """Return the run's tokenizer; look again if there was none, because a run saves it when it ends."""
        with self.loading:
            if run.folder not in self.tokens or self.tokens[run.folder].tokenizer is None:
                self.tokens[run.folder] = TokenTexts(run)
            return self.tokens[run.folder]
