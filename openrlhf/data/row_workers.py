"""Making rows in parts, by worker processes if there are many records.

`make_parts` yields the rows of a dataset, part by part. A worker is a Python process that receives a reader, then the
records of one part after another; it answers each with Arrow columns and the counts of the part's report. Parts are
assigned in turn, so they arrive roughly in the order they are needed:

    worker 0    part 0, part 2, part 4, ...
    worker 1    part 1, part 3, part 5, ...

A worker that fails for any reason just ends, and this process makes the parts that it was assigned. So an error in the
data is raised here, about the same record and with the same message as without workers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pyarrow as pa

from openrlhf.data.records import Place, Record, Records
from openrlhf.data.report import DataReport
from openrlhf.data.row_columns import LENGTH, make_batch
from openrlhf.data.rows import RowReader, make_rows
from openrlhf.monitor import say
from openrlhf.subprocesses import python_command

PART = 2000  # records
MIN_PARALLEL = 20_000  # records; a worker takes seconds to start
MAX_WORKERS = 16  # this process reads the records for all of them
AHEAD = 2  # parts per worker that are made before they are needed
NOWHERE = Place("", 0)  # a worker does not report errors
# A worker uses one core and no GPU.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class RowPart:
    """The rows of consecutive records as columns, and their report."""

    batch: pa.RecordBatch
    report: DataReport


def make_parts(records: Records, reader: RowReader[object], report: DataReport) -> Generator[tuple[int, RowPart]]:
    """Yield the number of records and the rows of each part, in order; merge their reports into `report`."""
    parts = [records.part(begin, begin + PART) for begin in range(0, len(records), PART)]
    told = False
    with open_workers(num_workers(len(records)), reader, report) as workers:
        for part, future in zip(parts, assign(parts, workers), strict=True):
            failure = future.exception() if future else None
            made = future.result() if future and not failure else None
            if made is None or contradicts(made.report, report):
                made = make_part(part, reader, report.part())
            if failure and not told:  # not because of the rows: `make_part` would have raised
                say(f"a worker process failed ({failure!r}), so tokenising its rows takes longer")
                told = True
            report.merge(made.report)
            yield len(part), made


def make_part(records: Iterable[Record], reader: RowReader[object], report: DataReport) -> RowPart:
    """Make the rows of some records in this process."""
    rows = make_rows(records, partial(reader.make, report=report), report)
    return RowPart(make_batch(reader.kind, rows, report.lengths), report)


def contradicts(part: DataReport, report: DataReport) -> bool:
    """Return whether labels differ in kind from those of earlier parts, which the worker has not seen."""
    return None not in (part.soft_labels, report.soft_labels) and part.soft_labels != report.soft_labels


def num_workers(num_records: int) -> int:
    """Return the number of worker processes, 0 if this process makes all rows."""
    if num_records < MIN_PARALLEL:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS) if cores > 1 else 0


def assign(parts: Sequence[Records], workers: Sequence[RowWorker]) -> Iterator[Future[RowPart] | None]:
    """Yield the result of each part, which may not be ready yet; None if there is no worker."""
    if not workers:
        yield from [None] * len(parts)
        return
    ahead: deque[Future[RowPart]] = deque()
    for number, part in enumerate(parts):
        ahead.append(workers[number % len(workers)].submit(part))
        if len(ahead) == AHEAD * len(workers):
            yield ahead.popleft()
    yield from ahead


@contextmanager
def open_workers(count: int, reader: RowReader[object], report: DataReport) -> Iterator[list[RowWorker]]:
    """Start worker processes, and end them with the context."""
    workers: list[RowWorker] = []
    try:
        for _ in range(count):
            workers.append(RowWorker(reader, report))
        yield workers
    finally:
        for worker in workers:
            worker.close()


class RowWorker:
    """A process that makes rows, and the thread that exchanges messages with it."""

    def __init__(self, reader: RowReader[object], report: DataReport) -> None:
        self.reader, self.report = reader, report.part()
        self.connection, theirs = Pipe()
        with theirs:
            code = f"from openrlhf.data.row_workers import serve; serve({theirs.fileno()})"
            self.process = subprocess.Popen(
                python_command(code),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # this process makes the part again, and prints any messages
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process
                env={**os.environ, **WORKER_ENVIRONMENT},
            )
        self.thread = ThreadPoolExecutor(1)
        self.started = self.thread.submit(self.connection.send, (reader, self.report))

    def submit(self, part: Records) -> Future[RowPart]:
        """Make the rows of a part after those submitted before."""
        return self.thread.submit(self._make, part)

    def _make(self, part: Records) -> RowPart:
        self.started.result()
        self.connection.send([record.row for record in part.read_all()])
        counts = json.loads(self.connection.recv_bytes())
        batch = pa.ipc.open_stream(self.connection.recv_bytes()).read_next_batch()
        return RowPart(batch, self.report.with_counts(counts, batch.column(LENGTH).to_numpy().tobytes()))

    def close(self) -> None:
        """End the process, and the thread with it."""
        self.process.kill()
        self.process.wait()
        self.thread.shutdown(cancel_futures=True)
        self.connection.close()


def serve(descriptor: int) -> None:
    """Make rows in a worker process until the other end of the connection is closed."""
    with Connection(descriptor) as connection:
        reader, report = connection.recv()
        while True:
            try:
                rows = connection.recv()
            except EOFError:
                return
            made = make_part([Record(row, NOWHERE) for row in rows], reader, report.part())
            connection.send_bytes(json.dumps(made.report.counts()).encode())
            content = pa.BufferOutputStream()
            with pa.ipc.new_stream(content, made.batch.schema) as stream:
                stream.write_batch(made.batch)
            connection.send_bytes(content.getvalue())
