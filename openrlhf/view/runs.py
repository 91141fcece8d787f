"""Find the runs below the given folders, and read how they were started.

A run is a folder with metrics or recorded rollouts (see `training/run_directory.py`). Users name a --run_dir, a
--save_path with `run/` in it, or a folder that contains several of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf.errors import ConfigError
from openrlhf.monitor import METRICS_FILE
from openrlhf.training.earlier_run import CONFIG_FILE, ROLLOUTS

MOST_DEPTH = 4  # levels of folders to search below a given one
USUAL_NAME = "run"  # default name of a run directory in --save_path, which does not distinguish runs


@dataclass(frozen=True)
class RunConfig:
    """How a run was started; empty if its config.json is missing or unreadable."""

    flags: Mapping[str, object] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)  # the working directory, which relative paths in flags start from


@dataclass(frozen=True)
class RunFolder:
    """A run directory, and the name that distinguishes it from the other runs of the page."""

    name: str
    folder: Path

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS_FILE

    @property
    def rollouts(self) -> Path:
        return self.folder / ROLLOUTS

    def config(self) -> RunConfig:
        path = self.folder / CONFIG_FILE
        if not path.is_file():  # a pipe in its place would block
            return RunConfig()
        try:
            content = json.loads(path.read_bytes(), parse_constant=str, parse_float=finite_or_text)
            return RunConfig(dict(content["flags"]), Path(str(content.get("cwd", ""))))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return RunConfig()


def finite_or_text(number: str) -> float | str:
    """Return a number; an infinite one, which is not JSON in a browser, as text, because flags are only shown."""
    return float(number) if math.isfinite(float(number)) else number


def find_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Return the runs below each folder, the oldest first; raise ConfigError for a folder without runs."""
    found: dict[Path, None] = {}
    for given in folders:
        folder = Path(given).expanduser().resolve()
        below = sorted(_run_folders(folder, MOST_DEPTH), key=_started)
        if not below:
            raise ConfigError(
                f"RUN_DIR {given}: contains no run, which is a folder with {METRICS_FILE}",
                try_this="the --save_path or --run_dir of a training command",
            )
        found |= dict.fromkeys(below)
    return [RunFolder(name, folder) for folder, name in _short_names(list(found)).items()]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs in a folder. The parts of a run are not searched, so `earlier/` must be named explicitly."""
    try:
        if (folder / METRICS_FILE).is_file() or (folder / ROLLOUTS).is_dir():
            yield folder
            return
        if depth == 0:
            return
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:  # not readable
        return
    for path in inside:
        yield from _run_folders(path, depth - 1)


def _started(folder: Path) -> tuple[float, Path]:
    """Return a key that sorts runs by their start; a folder that has just disappeared comes first."""
    config = folder / CONFIG_FILE
    try:
        return (config if config.exists() else folder).stat().st_mtime, folder
    except OSError:
        return 0.0, folder


def _short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Name each folder by as many of the last parts of its path as are needed to be unique."""
    paths = {folder: folder.parts[1:-1] if folder.name == USUAL_NAME else folder.parts[1:] for folder in folders}
    names = {folder: "/".join(parts[-1:]) for folder, parts in paths.items()}
    for length in range(2, max((len(parts) for parts in paths.values()), default=0) + 1):
        count = Counter(names.values())
        names = {
            folder: "/".join(paths[folder][-length:]) if count[name] > 1 else name for folder, name in names.items()
        }
    return names
