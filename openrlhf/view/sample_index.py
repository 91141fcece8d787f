"""SQLite index over recorded samples: filters, sorting and full-text search stay fast for 100,000 of them.

The index holds the columns for lists and filters, and the position of each sample in its file; tokens and full texts
stay in the files. `update` reads only new samples. One thread updates it, and any thread may query it: each call has
its own connection.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from openrlhf.errors import OpenRLHFError
from openrlhf.view.records import RecordFile, Sample, SampleRecords

PAGE_SIZE = 50
MOST_SHOWN = 160  # characters of prompt and response in a list
BATCH = 500  # samples per transaction: readers see progress, and a large file does not fill the memory
# Chinese and Japanese have no spaces between words, so the index treats each of their characters as a word, and the
# search treats a run of characters as a phrase. SQLite's trigrams would make the index three to seven times as large
# and need three characters, while most Chinese words have two. `source.js` has the same ranges.
UNSPACED = re.compile(
    r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)

# Rows of `texts` cannot be deleted, because it stores no texts. AUTOINCREMENT never reuses the number of a deleted
# sample, so its leftover words match nothing. Each index ends with the rowid, which makes every order unique.
SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE files (
    id INTEGER PRIMARY KEY, run INTEGER, name TEXT, version TEXT, done INTEGER, unreadable INTEGER,
    UNIQUE (run, name)
);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, place INTEGER, run INTEGER, step INTEGER, prompt_index INTEGER,
    reward REAL, length INTEGER, truncated INTEGER, turns INTEGER, prompt TEXT, response TEXT
);
CREATE INDEX by_step ON samples (run, step DESC);
CREATE INDEX by_group ON samples (run, prompt_index, step);
CREATE INDEX by_reward ON samples (run, reward);
CREATE INDEX by_length ON samples (run, length);
CREATE INDEX by_file ON samples (file);
CREATE VIRTUAL TABLE texts USING fts5 (prompt, response, content = '', columnsize = 0);
"""
Order: TypeAlias = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]
ORDERS: dict[Order, str] = {
    "newest": "step DESC, id",
    "oldest": "step, id",
    "best": "reward DESC, id DESC",
    "worst": "reward, id",
    "longest": "length DESC, id DESC",
    "shortest": "length, id",
}
Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Query:
    """Filters for the samples of a run; None means no filter. Bounds are inclusive."""

    run: int
    step_from: float | None = None
    step_to: float | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: float | None = None
    length_to: float | None = None
    finish: Finish | None = None
    prompt_index: int | None = None
    text: str = ""
    order: Order = "newest"
    page: int = 0


@dataclass(frozen=True)
class SampleRow:
    """One line of a list of samples; prompt and response are shortened."""

    id: int
    step: int
    prompt_index: int
    reward: float | None
    length: int
    truncated: int  # 0 or 1, as SQLite has no booleans
    turns: int
    prompt: str
    response: str


@dataclass(frozen=True)
class Found:
    """One page of the samples that match a query."""

    rows: list[SampleRow]
    total: int  # samples that match
    indexed: int  # samples of the run
    unreadable: int  # records of the run that are not samples
    page_size: int = PAGE_SIZE


@dataclass(frozen=True)
class Located:
    """The location of a sample's record."""

    id: int
    run: int
    file: str
    place: int


class SampleIndex:
    """The index of all runs of a page, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stopped = threading.Event()
        try:
            with self._connect() as database:
                database.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            raise OpenRLHFError(f"Python's SQLite cannot index the samples: {error}") from error

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection; `with database:` makes a transaction."""
        with closing(sqlite3.connect(self.path, timeout=60)) as database:
            database.execute("PRAGMA synchronous = OFF")  # the index is temporary: do not wait for the disk
            yield database

    def update(self, run: int, records: SampleRecords) -> int:
        """Index new records of a run; return the number of records read.

        If a file cannot be read, raise OSError after the other files have been indexed.
        """
        count = 0
        failure: OSError | None = None
        with self._connect() as database:
            files = {file.name: file for file in records.files()}
            known = self._forget_replaced(database, run, files)
            for file in files.values():
                if known.get(file.name, 0) < file.size:
                    try:
                        count += self._read_file(database, run, file, records)
                    except OSError as error:
                        failure = error
        if failure:
            raise failure
        return count

    def _forget_replaced(
        self, database: sqlite3.Connection, run: int, files: Mapping[str, RecordFile]
    ) -> dict[str, int]:
        """Forget the files that were moved or replaced; return how far the others have been read."""
        known: dict[str, int] = {}
        rows = database.execute("SELECT id, name, version, done FROM files WHERE run = ?", [run]).fetchall()
        for number, name, version, done in rows:
            if name in files and files[name].version == version and files[name].size >= done:
                known[name] = done
                continue
            with database:
                database.execute("DELETE FROM samples WHERE file = ?", [number])
                database.execute("DELETE FROM files WHERE id = ?", [number])
        return known

    def _read_file(self, database: sqlite3.Connection, run: int, file: RecordFile, records: SampleRecords) -> int:
        """Index the rest of a file; return the number of records read."""
        with database:
            database.execute(
                "INSERT OR IGNORE INTO files (run, name, version, done, unreadable) VALUES (?, ?, ?, 0, 0)",
                [run, file.name, file.version],
            )
        number, done = database.execute(
            "SELECT id, done FROM files WHERE run = ? AND name = ?", [run, file.name]
        ).fetchone()
        rest = records.read(file.name, done)
        count = 0
        while not self.stopped.is_set() and (batch := list(islice(rest, BATCH))):
            count += len(batch)
            with database:  # in one transaction: the samples, and the position of the next one
                for record in batch:
                    if record.sample is not None:
                        _insert(database, run, number, record.place, record.sample)
                broken = sum(record.sample is None for record in batch)
                database.execute(
                    "UPDATE files SET done = ?, unreadable = unreadable + ? WHERE id = ?",
                    [batch[-1].end, broken, number],
                )
        return count

    def stop(self) -> None:
        """Stop an update in progress early, and turn later updates into no-ops."""
        self.stopped.set()

    def find(self, query: Query) -> Found:
        """Return one page of the samples that match."""
        where, values = conditions(query)
        columns = "id, step, prompt_index, reward, length, truncated, turns, prompt, response"
        with self._connect() as database:
            (total,) = database.execute(f"SELECT count(*) FROM samples WHERE {where}", values).fetchone()
            (indexed,) = database.execute("SELECT count(*) FROM samples WHERE run = ?", [query.run]).fetchone()
            (unreadable,) = database.execute(
                "SELECT coalesce(sum(unreadable), 0) FROM files WHERE run = ?", [query.run]
            ).fetchone()
            rows = database.execute(
                f"SELECT {columns} FROM samples WHERE {where} ORDER BY {ORDERS[query.order]} LIMIT ? OFFSET ?",
                [*values, PAGE_SIZE, query.page * PAGE_SIZE],
            )
            return Found([SampleRow(*row) for row in rows], total, indexed, unreadable)

    def group_of(self, sample: int) -> list[Located]:
        """Return the samples of the same prompt and step, in the order of the record; empty for an unknown number."""
        with self._connect() as database:
            rows = database.execute(
                """
                SELECT other.id, other.run, files.name, other.place
                FROM samples AS one
                JOIN samples AS other USING (run, prompt_index, step)
                JOIN files ON files.id = other.file
                WHERE one.id = ? ORDER BY other.id
                """,
                [sample],
            )
            return [Located(*row) for row in rows]

    def counts(self) -> dict[int, int]:
        """Return the number of indexed samples by run."""
        with self._connect() as database:
            return dict(database.execute("SELECT run, count(*) FROM samples GROUP BY run").fetchall())


def _insert(database: sqlite3.Connection, run: int, file: int, place: int, sample: Sample) -> None:
    values = (sample.step, sample.prompt_index, sample.reward, sample.length, sample.truncated, sample.turns)
    added = database.execute(
        "INSERT INTO samples (file, place, run, step, prompt_index, reward, length, truncated, turns, prompt, response)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [file, place, run, *values, sample.prompt[-MOST_SHOWN:], sample.response[:MOST_SHOWN]],
    )
    database.execute(
        "INSERT INTO texts (rowid, prompt, response) VALUES (?, ?, ?)",
        [added.lastrowid, _spaced(sample.prompt), _spaced(sample.response)],
    )


def conditions(query: Query) -> tuple[str, list[object]]:
    """Return the WHERE clause of a query, with placeholders, and their values."""
    comparisons: list[tuple[str, object]] = [
        ("run = ?", query.run),
        ("step >= ?", query.step_from),
        ("step <= ?", query.step_to),
        ("reward >= ?", query.reward_from),
        ("reward <= ?", query.reward_to),
        ("length >= ?", query.length_from),
        ("length <= ?", query.length_to),
        ("truncated = ?", None if query.finish is None else query.finish == "length"),
        ("prompt_index = ?", query.prompt_index),
        ("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", match_words(query.text)),
    ]
    chosen = [(text, value) for text, value in comparisons if value is not None]
    return " AND ".join(text for text, _ in chosen), [value for _, value in chosen]


def match_words(text: str) -> str | None:
    """Return an FTS5 query that matches texts with a word starting with each search word; None for an empty search.

    FTS5 splits words at underscores, so `a_b` becomes the phrase `a b`. A search without any word, such as
    punctuation, matches nothing.
    """
    if not text.strip():
        return None
    words = [word for word in re.findall(r"\w+", text) if word.strip("_")]
    return " ".join(f'"{_spaced(word)}"*' for word in words) or '""'


def _spaced(text: str) -> str:
    """Return the text with spaces around each Chinese or Japanese character."""
    return UNSPACED.sub(r" \g<0> ", text)
