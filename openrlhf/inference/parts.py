"""Resumable output of batch_inference, written by one process or several.

During a run, the folder OUTPUT.parts is next to OUTPUT. Its plan.json records the settings of the run, and each
process appends its finished rows to its own rank*.jsonl, as {"number": ..., "row": ...}. If the run is killed, the same
command resumes from there: each process skips the numbers that any process has finished. When all rows are done, they
are written to OUTPUT in order, in one atomic step, and the folder is removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from openrlhf.config.checks.paths import looks_local
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.sections.data import split_names
from openrlhf.errors import BackendError, ConfigError, DataError
from openrlhf.training.folder_lock import hold_folder
from openrlhf.training.run_directory import shown_flags

PLAN = "plan.json"
ROWS = "rank*.jsonl"
# Flags that may change between runs: they affect speed or the final processing of rows, not their content.
FREE_TO_CHANGE = (
    *("output_path", "micro_batch_size", "max_num_seqs", "tp_size", "enable_prefix_caching", "zero_stage"),
    "vllm_num_engines",
    *("local_rank", "post_processor", "reward_template", "normalize_reward"),
)

Row = Mapping[str, object]  # a line of the output: JSON values by column


RowLocation = tuple[Path, int]  # file of a finished row, and the offset of its line in bytes


class OutputParts:
    """Rows of one run, numbered from 0. Each `group` consecutive rows go to the same process.

    This process writes finished rows to `file`, which the caller closes. It holds `lock`, so that no other run writes
    the same output; the caller closes `lock` once the output is written.
    """

    def __init__(self, output: Path, config: object, *, total: int, group: int = 1) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        self.aside = output.with_name(f".{output.name}.writing")
        self.total = total
        self.group = group
        self.rank, self.world = int(os.environ.get("RANK", "0")), world_size()
        with ExitStack() as stack:
            stack.enter_context(hold_folder(self.folder, "--output_path", f".rank{self.rank}.lock"))
            self._open_folder(row_settings(config, total, apart_from=(self.folder, self.aside, output)))
            own = self.folder / f"rank{self.rank}.jsonl"
            if own.is_file():  # remove the incomplete last line that a killed process may have left
                with own.open("r+b") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
            self.found = find_rows(self.folder)  # rows that were finished when this process started
            # Line-buffered, so that a killed process loses no finished row.
            self.file = own.open("a", buffering=1, encoding="utf-8")
            self.lock = stack.pop_all()  # held from now on

    def _open_folder(self, now: Mapping[str, object]) -> None:
        """Compare this run with the one that left rows in the folder, or record its settings in a new plan.

        A run whose settings differ from those of the unfinished one is rejected, because its rows would differ too.
        """
        plan = self.folder / PLAN
        if not plan.is_file() or not find_rows(self.folder):  # a run that failed before its first row does not count
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f".{PLAN}.rank{self.rank}"  # so that no process reads a partial plan
            aside.write_text(json.dumps(now, indent=1), encoding="utf-8")
            aside.rename(plan)
            return
        before: dict[str, object] = json.loads(plan.read_text(encoding="utf-8"))
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            what = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in changed)
            raise ConfigError(
                f"{self.folder} contains rows of an unfinished run with other settings: {what}",
                try_this=f"the original flags to resume, rm -r {self.folder} to start over, or another --output_path",
            )

    @property
    def share(self) -> list[int]:
        """Row numbers assigned to this process, including finished rows."""
        return [number for number in range(self.total) if number // self.group % self.world == self.rank]

    @property
    def missing(self) -> list[int]:
        """Row numbers of this process's share that were not finished when it started: the work to do."""
        return [number for number in self.share if number not in self.found]

    def write(self, number: int, row: Row) -> None:
        """Store a finished row."""
        self.file.write(as_line({"number": number, "row": row}))

    def rows(self) -> Iterator[Row]:
        """Yield all rows in order; call it after every process has written its share."""
        found = find_rows(self.folder)
        lost = [number for number in range(self.total) if number not in found]
        if lost:
            raise BackendError(
                f"{self.folder} lacks {len(lost)} of {self.total} rows", try_this="the same command again"
            )
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in self.folder.glob(ROWS)}
            for number in range(self.total):
                path, start = found[number]
                files[path].seek(start)
                yield json.loads(files[path].readline())["row"]

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
            path.unlink()  # before the plan, because rows without one would be mistaken for rows of the next run
        shutil.rmtree(self.folder, ignore_errors=True)  # other ranks remove their locks at the same time
        return count


def as_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def find_rows(folder: Path) -> dict[int, RowLocation]:
    """Return the location of each finished row; an incomplete last line of a file does not count."""
    found: dict[int, RowLocation] = {}
    for path in sorted(folder.glob(ROWS)):
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    try:
                        number = json.loads(line)["number"]
                    except (ValueError, KeyError, TypeError):
                        raise DataError(f"{path} is damaged", try_this=f"rm -r {path.parent}, to start over") from None
                    found[number] = (path, start)
                start += len(line)
    return found


def row_settings(config: object, total: int, *, apart_from: Sequence[Path]) -> dict[str, object]:
    """Return everything that determines the rows: flags, the number of rows, and the state of local models and data.

    The state of a local file or folder is its total size and newest modification time. Files that the run itself writes
    (`apart_from`) are ignored, since the output may be in the model's folder.
    """
    ours = {path.resolve() for path in apart_from}

    def state(name: str) -> list[int]:
        path = Path(name).expanduser()
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        stats = [item.stat() for item in files if ours.isdisjoint([item.resolve(), *item.resolve().parents])]
        return [sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)]

    settings = {f"--{name}": value for name, value in shown_flags(config).items() if name not in FREE_TO_CHANGE}
    for flag in ("--pretrain", "--dataset"):
        names = split_names(str(settings.get(flag) or ""))
        local = [name for name in names if looks_local(name) or Path(name).exists()]
        settings[f"the content of {flag}"] = [state(name) for name in local]
    return settings | {"number of rows": total}
