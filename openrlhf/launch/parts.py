"""Rows that are written as they are made, by one process or several, and that a killed run finds again.

Beside OUTPUT lies OUTPUT.parts while a run is on its way: plan.json says what was asked for, and each process appends
its finished rows to a file of its own. The same command goes on from there. When every row is there OUTPUT appears
whole, in order, and the folder goes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from openrlhf.config.checks.paths import looks_local
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.sections.data import split_names
from openrlhf.errors import BackendError, ConfigError, DataError
from openrlhf.launch.record import shown_flags

PLAN = "plan.json"
ROWS = "rank*.jsonl"
# Flags that decide how fast rows come, or what becomes of them at the end, and not what they are.
FREE_TO_CHANGE = (
    *("output_path", "micro_batch_size", "max_num_seqs", "tp_size", "enable_prefix_caching", "zero_stage"),
    "vllm_num_engines",
    *("local_rank", "post_processor", "reward_template", "normalize_reward"),
)
LOOK, GRACE = 1, 10  # seconds: how often a process looks after its launcher, and what it has for its end
PATIENCE = timedelta(days=7)  # a process may finish its share long before the others

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a finished row stands: a file, and its line's first byte and the one past its last."""

    file: Path
    start: int
    end: int


class Parts:
    """The rows of one run, numbered from 0; those of a group go to the same process."""

    def __init__(self, output: Path, config: object, *, total: int, group: int = 1) -> None:
        self.output = output
        self.folder = parts_folder(output)
        self.aside = output.with_name(f".{output.name}.writing")
        self.total, self.group = total, group
        self.rank, self.world = int(os.environ.get("RANK", "0")), world_size()
        self.own = self.folder / f"rank{self.rank}.jsonl"
        self._open_folder(wanted(config, total, apart_from=(self.folder, self.aside, output)))
        drop_half_line(self.own)
        self.found = find_rows(self.folder)
        self.file = self.own.open("a", buffering=1)  # each row is on its way to the disk when the next one is made

    def _open_folder(self, asked: dict[str, Any]) -> None:
        plan = self.folder / PLAN
        if plan.is_file() and find_rows(self.folder):  # a run that made none, for want of a model, binds nobody
            self._compare(json.loads(plan.read_text()), asked)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{PLAN}.rank{self.rank}"  # each process writes the same, and none sees half of it
        aside.write_text(json.dumps(asked, indent=1))
        aside.rename(plan)

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            what = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in changed)
            raise ConfigError(
                f"{self.folder} holds rows of a run that was not finished, and since then this has changed: {what}",
                try_this=f"what it was, to go on; or rm -r {self.folder}, to start anew; or another --output_path",
            )

    @property
    def share(self) -> list[int]:
        """The rows that are this process's to make, finished ones included."""
        return [number for number in range(self.total) if number // self.group % self.world == self.rank]

    @property
    def missing(self) -> list[int]:
        return [number for number in self.share if number not in self.found]

    def write(self, number: int, row: Row) -> None:
        self.file.write(as_line({"number": number, "row": row}))

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows in order, once every process has written its own."""
        found = find_rows(self.folder)
        lost = [number for number in range(self.total) if number not in found]
        if lost:
            raise BackendError(f"{self.folder} lacks {len(lost)} of {self.total} rows; the same command makes them")
        files = {place.file: place.file.open("rb") for place in found.values()}
        try:
            for number in range(self.total):
                place = found[number]
                files[place.file].seek(place.start)
                yield json.loads(files[place.file].read(place.end - place.start))["row"]
        finally:
            for file in files.values():
                file.close()

    def finish(self, rows: Iterable[Row]) -> int:
        """Writes the output whole, and only then forgets the parts; says how many rows it has."""
        count = 0
        with self.aside.open("w") as file:
            for row in rows:
                file.write(as_line(row))
                count += 1
            file.flush()
            os.fsync(file.fileno())
        self.aside.rename(self.output)
        for path in self.folder.glob(ROWS):
            path.unlink()  # before their plan: without it they would pass for rows of whatever is asked for next
        shutil.rmtree(self.folder)
        return count

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parts_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def as_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def drop_half_line(path: Path) -> None:
    """A process that was killed may have left the beginning of a row."""
    if path.is_file():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def find_rows(folder: Path) -> dict[int, Place]:
    """Where each finished row stands; a half line at the end of a file, or one that is being written, is none."""
    found: dict[int, Place] = {}
    for path in sorted(folder.glob(ROWS)):
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    found[number_of(line, path)] = Place(path, start, start + len(line))
                start += len(line)
    return found


def number_of(line: bytes, path: Path) -> int:
    try:
        return json.loads(line)["number"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged", try_this=f"rm -r {path.parent}, to start anew") from None


def wanted(config: object, total: int, *, apart_from: Sequence[Path]) -> dict[str, Any]:
    """What the rows depend on: flags, how many there are, and the state of local models and data.

    What the run itself writes does not count, since it may do so in the folder of its model.
    """
    flags = {f"--{name}": value for name, value in shown_flags(config).items() if name not in FREE_TO_CHANGE}
    named = {name: str(flags.get(name) or "") for name in ("--pretrain", "--dataset")}
    contents = {f"the content of {name}": state_of(value, apart_from) for name, value in named.items()}
    return flags | contents | {"number of rows": total}


def state_of(names: str, apart_from: Sequence[Path]) -> list[list[int]]:
    """Size and time of the newest change of each local file or folder in a comma list."""
    paths = [Path(name).expanduser() for name in split_names(names) if looks_local(name) or Path(name).exists()]
    ours = {path.resolve() for path in apart_from}
    states = []
    for path in paths:
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        stats = [item.stat() for item in files if ours.isdisjoint([item.resolve(), *item.resolve().parents])]
        states.append([sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)])
    return states


def end_with_launcher() -> None:
    """Ends this process soon after the launcher that started it.

    One that was killed leaves its processes behind: they would finish, wait for each other at an address that is gone,
    for days and with their GPUs, and write beside those that the same command starts again.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)  # heard as Ctrl-C is, unless it waits for the others
        time.sleep(GRACE)
        os._exit(1)

    if world_size() > 1:
        threading.Thread(target=watch, daemon=True, name="openrlhf-launcher").start()


def wait_for_everyone() -> None:
    """Returns when every process of the launcher has come here."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        dist.barrier()
    finally:
        dist.destroy_process_group()
