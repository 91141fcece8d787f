"""Resumable output of batch_inference, written by one process or several.

During a run, the folder OUTPUT.parts lies beside OUTPUT. Its plan.json records the settings of the run, and each
process appends its finished rows to its own rank*.jsonl. If the run is killed, the same command resumes from there.
When all rows are done, OUTPUT is written in order and appears as a whole, and the folder is removed.
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
from openrlhf.training.flag_record import shown_flags

PLAN = "plan.json"
ROWS = "rank*.jsonl"
# Flags that may change between runs: they affect speed or the final processing of rows, not their content.
FREE_TO_CHANGE = (
    *("output_path", "micro_batch_size", "max_num_seqs", "tp_size", "enable_prefix_caching", "zero_stage"),
    "vllm_num_engines",
    *("local_rank", "post_processor", "reward_template", "normalize_reward"),
)
LOOK, GRACE = 1, 10  # seconds: interval between checks of the launcher, and time to exit after it has died
PATIENCE = timedelta(days=7)  # barrier timeout: a process may finish its share long before the others

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Location of a finished row: its file and the byte range [start, end) of its line."""

    file: Path
    start: int
    end: int


class Parts:
    """Rows of one run, numbered from 0. Each `group` consecutive rows go to the same process."""

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
        self.file = self.own.open(
            "a", buffering=1, encoding="utf-8"
        )  # line-buffered: a killed process loses no finished row

    def _open_folder(self, asked: dict[str, Any]) -> None:
        """Compare this run with the one that left rows in the folder, or record its settings in a new plan."""
        plan = self.folder / PLAN
        if plan.is_file() and find_rows(self.folder):  # a run that failed before its first row does not count
            self._compare(json.loads(plan.read_text(encoding="utf-8")), asked)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{PLAN}.rank{self.rank}"  # all processes write the same plan; none reads a partial one
        aside.write_text(json.dumps(asked, indent=1), encoding="utf-8")
        aside.rename(plan)

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Reject a run whose settings differ from those of the unfinished run in the folder."""
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            what = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in changed)
            raise ConfigError(
                f"{self.folder} holds rows of a run that was not finished, and since then this has changed: {what}",
                try_this=f"the original flags to resume, rm -r {self.folder} to start over, or another --output_path",
            )

    @property
    def share(self) -> list[int]:
        """Row numbers assigned to this process, including finished rows."""
        return [number for number in range(self.total) if number // self.group % self.world == self.rank]

    @property
    def missing(self) -> list[int]:
        """Row numbers of this process's share that were not finished when it started."""
        return [number for number in self.share if number not in self.found]

    def write(self, number: int, row: Row) -> None:
        self.file.write(as_line({"number": number, "row": row}))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows in order; call it after every process has written its share."""
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
        """Write the output atomically, then delete the parts; return the number of rows."""
        count = 0
        with self.aside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(as_line(row))
                count += 1
            file.flush()
            os.fsync(file.fileno())
        self.aside.rename(self.output)
        for path in self.folder.glob(ROWS):
            path.unlink()  # before the plan: rows without a plan would be taken for rows of the next run
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
    """Remove the incomplete last line that a killed process may have left."""
    if path.is_file():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def find_rows(folder: Path) -> dict[int, Place]:
    """Return the location of each finished row; an incomplete last line of a file does not count."""
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
    """Return the row number of a stored line; a line that cannot be parsed means a damaged file."""
    try:
        return json.loads(line)["number"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged", try_this=f"rm -r {path.parent}, to start over") from None


def wanted(config: object, total: int, *, apart_from: Sequence[Path]) -> dict[str, Any]:
    """Return everything the rows depend on: flags, the number of rows, and the state of local models and data.

    Files that the run itself writes (`apart_from`) are ignored, since the output may lie in the model's folder.
    """
    flags = {f"--{name}": value for name, value in shown_flags(config).items() if name not in FREE_TO_CHANGE}
    named = {name: str(flags.get(name) or "") for name in ("--pretrain", "--dataset")}
    contents = {f"the content of {name}": state_of(value, apart_from) for name, value in named.items()}
    return flags | contents | {"number of rows": total}


def state_of(names: str, apart_from: Sequence[Path]) -> list[list[int]]:
    """Return total size and newest modification time of each local file or folder in a comma-separated list."""
    paths = [Path(name).expanduser() for name in split_names(names) if looks_local(name) or Path(name).exists()]
    ours = {path.resolve() for path in apart_from}
    states = []
    for path in paths:
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        stats = [item.stat() for item in files if ours.isdisjoint([item.resolve(), *item.resolve().parents])]
        states.append([sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)])
    return states


def end_with_launcher() -> None:
    """Exit this process soon after its launcher dies.

    The processes of a killed launcher keep running. They would finish their shares and then wait for each other for
    days at an address that is gone, holding their GPUs, and would write to the same files as a restarted run.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)  # handled like Ctrl-C, except while waiting in the barrier
        time.sleep(GRACE)
        os._exit(1)

    if world_size() > 1:
        threading.Thread(target=watch, daemon=True, name="openrlhf-launcher").start()


def wait_for_everyone() -> None:
    """Block until every process of the launcher has reached this call."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        dist.barrier()
    finally:
        dist.destroy_process_group()
