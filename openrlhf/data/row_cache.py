"""Tokenised rows on disk, made once and mapped by all processes of a machine and by later runs.

`load_rows` returns the rows of a dataset. A small dataset is read into memory. The rows of a large one are two files in
the folder `openrlhf_rows` of the datasets cache, named after a hash of everything that determines them (`row_key`):

    KEY.arrow    the rows as columns (`row_columns`)
    KEY.json     the checksum of that file, and the report's counts; written last

Files appear under their names only when they are complete. Of several processes, the first one makes the rows while the
others wait for its lock. Damaged files are rebuilt. If they cannot be written, rows are kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import pyarrow as pa
from filelock import FileLock

from openrlhf.data.records import Records
from openrlhf.data.report import DataReport
from openrlhf.data.row_columns import FORMATS, LENGTH, MappedRows, NotStorable, map_rows
from openrlhf.data.row_key import row_key
from openrlhf.data.row_workers import make_parts
from openrlhf.data.rows import RowReader, build_rows, progress_bar
from openrlhf.monitor import say

Row = TypeVar("Row")

MIN_CACHED = 10_000  # records; fewer are tokenised in a few seconds
FOLDER = "openrlhf_rows"
WAIT_S = 2 * 60 * 60  # time limit for another process that makes the rows


def load_rows(records: Records, reader: RowReader[Row], report: DataReport) -> Sequence[Row]:
    """Return the rows of all records: made now, or found in the cache if they were made before.

    Raise an error if hardly any record can be used.
    """
    key = row_key(records, reader, report.budget) if len(records) >= MIN_CACHED else None
    if key is None:
        return build_rows(records, partial(reader.make, report=report), report)
    files = RowFiles(Path(datasets.config.HF_DATASETS_CACHE) / FOLDER, key)
    try:
        rows, found = files.find(reader.kind, report) or files.make(records, reader, report)
    except (OSError, NotStorable) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        say(f"{records.name}: rows are kept in memory, because they cannot be cached in {files.folder}: {why}")
        return build_rows(records, partial(reader.make, report=report), report)
    report.read = len(records)
    report.merge(found)
    report.require_rows()
    return rows


@dataclass(frozen=True)
class RowFiles:
    """The files of one set of rows."""

    folder: Path
    key: str

    @property
    def rows_file(self) -> Path:
        return self.folder / f"{self.key}.arrow"

    @property
    def counts_file(self) -> Path:
        return self.folder / f"{self.key}.json"

    def find(self, kind: type[Row], report: DataReport) -> tuple[MappedRows[Row], DataReport] | None:
        """Map the rows and return them with their report; None if the files are missing or damaged."""
        try:
            expected, _, text = self.counts_file.read_text(encoding="utf-8").partition("\n")
            if expected != hashlib.sha256(text.encode()).hexdigest():
                return None
            stored: dict[str, Any] = json.loads(text)
            if checksum(self.rows_file) != stored["sha256"]:
                return None
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        mapped = pa.ipc.open_file(pa.memory_map(str(self.rows_file)))
        batches = [mapped.get_batch(number) for number in range(mapped.num_record_batches)]
        lengths = b"".join(batch.column(LENGTH).to_numpy().tobytes() for batch in batches)
        return map_rows(kind, batches), report.with_counts(stored["counts"], lengths)

    def make(self, records: Records, reader: RowReader[Row], report: DataReport) -> tuple[MappedRows[Row], DataReport]:
        """Make the rows, or wait until another process has made them; return them with their report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{self.key}.lock", timeout=WAIT_S):
            found = self.find(reader.kind, report)
            if found is None:
                for leftover in self.folder.glob(f"{self.key}.*.tmp"):  # left by a killed process
                    leftover.unlink()
                self._write(records, reader, report.part())
                found = self.find(reader.kind, report)
        if found is None:
            raise OSError(f"{self.rows_file} changed after it was written")
        return found

    def _write(self, records: Records, reader: RowReader[Row], report: DataReport) -> None:
        """Make the rows and write both files."""
        aside = self.folder / f"{self.key}.{secrets.token_hex(4)}.tmp"
        try:
            with (
                aside.open("wb") as file,
                pa.ipc.new_file(file, FORMATS[reader.kind].schema) as writer,
                closing(make_parts(records, reader, report)) as parts,  # ends workers even if the disk is full
                progress_bar(len(records)) as bar,
            ):
                for count, part in parts:
                    writer.write_batch(part.batch)
                    bar.update(count)
            if row_key(records, reader, report.budget) != self.key:
                raise NotStorable("the data changed while it was read")
            text = json.dumps({"sha256": checksum(aside), "counts": report.counts()})
            publish(aside, self.rows_file)
            aside.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", encoding="utf-8")
            publish(aside, self.counts_file)
        finally:
            aside.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, which is read without mapping it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(aside: Path, path: Path) -> None:
    """Flush a complete file to disk, then rename it: a crash of the machine must not leave a partial file."""
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
