"""Move the record of an earlier run to another folder; records are never deleted.

A new run in the same run directory moves the earlier run's metrics and rollouts to run_dir/earlier/TIME, with a copy of
its config.json; TIME is when the earlier run started. A resumed run does the same with the steps after its checkpoint,
so that metrics.jsonl and rollouts/ always describe one uninterrupted run.
"""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

from openrlhf.errors import DiskError
from openrlhf.monitor import METRICS_FILE, say
from openrlhf.training.disk_space import disk_failure, replace_file

EARLIER, CONFIG_FILE = "earlier", "config.json"
ROLLOUTS, STEP_FILE = "rollouts", "step_{:06d}.parquet"
ABOUT_FILE = ".about.json"  # in ROLLOUTS; hidden, so that `datasets` can load the folder
STEP_NUMBER = re.compile(r"step_(\d+)\.(parquet|jsonl)")  # versions before 1.1 wrote JSON lines


def set_earlier_run_aside(run_dir: Path, resumed_at: int = 0) -> None:
    """Move the record of all steps after `resumed_at` to another folder, and print its name."""
    try:
        moved = _set_aside(run_dir, resumed_at)
    except OSError as error:
        raise DiskError(f"--run_dir {run_dir} cannot be written: {disk_failure(error) or error}") from error
    if moved:
        what = f"the record of steps after {resumed_at}" if resumed_at else "the record of an earlier run"
        say(f"{what} is now in {moved}")


def _set_aside(run_dir: Path, resumed_at: int) -> Path | None:
    metrics, rollouts, config = run_dir / METRICS_FILE, run_dir / ROLLOUTS, run_dir / CONFIG_FILE
    for target in (config, metrics, rollouts / "step_*", rollouts / ABOUT_FILE):
        for unfinished in target.parent.glob(f".{target.name}.writing-*"):  # a run was killed in `replace_file`
            unfinished.unlink()
    kept, dropped = split_metrics(metrics, resumed_at)
    files = [file for file in step_files(rollouts) if not 0 < step_of(file) <= resumed_at]
    if not dropped and not files:
        return None

    started = (config if config.exists() else metrics if metrics.exists() else files[0]).stat().st_mtime
    aside = _new_folder(run_dir / EARLIER / datetime.fromtimestamp(started).strftime("%Y-%m-%dT%H-%M-%S"))
    if config.exists():
        shutil.copy2(config, aside)
    if files:
        (aside / ROLLOUTS).mkdir()
        if (rollouts / ABOUT_FILE).exists():
            shutil.copy2(rollouts / ABOUT_FILE, aside / ROLLOUTS)
    for file in files:
        file.rename(aside / ROLLOUTS / file.name)
    if kept:  # in this order, a crash may duplicate lines but never loses any
        replace_file(aside / METRICS_FILE, dropped)
        replace_file(metrics, kept)
    elif metrics.exists():
        metrics.rename(aside / METRICS_FILE)
    return aside


def split_metrics(path: Path, resumed_at: int) -> tuple[str, str]:
    """Split the lines of a metrics file into those of steps up to `resumed_at`, and the others.

    A line that a crash cut short counts as one of the others.
    """
    kept: list[str] = []
    dropped: list[str] = []
    # "surrogateescape" preserves bytes that are not UTF-8 until they are written again.
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            is_kept = resumed_at > 0 and line.endswith("\n") and json.loads(line)["step"] <= resumed_at
        except (ValueError, KeyError, TypeError):
            is_kept = False
        (kept if is_kept else dropped).append(line)
    return "".join(kept), "".join(dropped)


def has_record(run_dir: Path) -> bool:
    """Return whether a run has written metrics or rollouts here."""
    metrics = run_dir / METRICS_FILE
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(step_files(run_dir / ROLLOUTS))


def step_files(folder: Path) -> list[Path]:
    """Return the files of recorded samples in a folder, in the order of their names."""
    return sorted(file for file in folder.glob("step_*") if file.suffix in (".parquet", ".jsonl"))


def step_of(file: Path) -> int:
    """Return the step of a file of recorded samples; 0 if its name does not say."""
    match = STEP_NUMBER.fullmatch(file.name)
    return int(match[1]) if match else 0


def _new_folder(folder: Path) -> Path:
    """Create the folder; if it exists, create one with a number appended to the name."""
    for number in range(1, 10_000):
        path = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        if not path.exists():
            path.mkdir(parents=True)
            return path
    raise FileExistsError(folder)
