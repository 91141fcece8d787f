"""Checkpoints that appear whole or not at all, in files that hold no code: safetensors and JSON."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from openrlhf.errors import BackendError

STATE = "state.json"
LATEST = "latest"
PREFIX = "global_step"
STEP = re.compile(rf"{PREFIX}(\d+)(_hf)?")
MARKERS = ("config.json", "adapter_config.json")  # what makes a folder a model for Transformers and PEFT
GIB = 1024**3


class Ranks(Protocol):
    """Processes that write one checkpoint together."""

    @property
    def process(self) -> int: ...

    def barrier(self) -> None: ...


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def write_together(ranks: Ranks, folder: Path, fill: Callable[[Path], None]) -> None:
    """A folder that all ranks fill aside; then the first one flushes it to the disk and renames it into place."""
    aside = folder.with_name(f".{folder.name}.writing")
    if ranks.process == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    ranks.barrier()
    fill(aside)
    ranks.barrier()
    if ranks.process == 0:
        flush_tree(aside)
        publish(aside, folder)
    ranks.barrier()


def flush_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def publish(aside: Path, folder: Path) -> None:
    """Renames a finished folder into place; an older one of the same name goes only after the new one is there."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def export_together(ranks: Ranks, folder: Path, fill: Callable[[Path], None]) -> None:
    """A model folder written aside and moved file by file, so that what else lies in `folder` stays.

    config.json goes first and comes last: a folder without it is no model, so a half-moved one is never taken for
    whole. An older export goes: Transformers would take its model.safetensors before new shards, and put its adapter on
    new weights. Adapters leave a whole model alone, which may be the one they belong to.
    """
    aside = _exporting(folder)
    write_together(ranks, aside, fill)
    if ranks.process == 0:
        _move_into(folder, aside)
    ranks.barrier()


def begin_export(folder: Path) -> Path:
    """A fresh folder beside `folder`, to be filled and handed to `finish_export`."""
    aside = _exporting(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def finish_export(aside: Path, folder: Path) -> None:
    """What `export_together` does at its end, for one process that had others fill the folder."""
    flush_tree(aside)
    _move_into(folder, aside)


def _exporting(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.exporting"


def _move_into(folder: Path, aside: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in _replaced(folder, whole_model=(aside / "config.json").exists()):
        path.unlink()
    for path in sorted(aside.iterdir(), key=lambda path: path.name in MARKERS):
        if (folder / path.name).is_dir():
            shutil.rmtree(folder / path.name)
        path.replace(folder / path.name)
    aside.rmdir()


def write_text_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text)
    _flush(aside)
    aside.rename(path)


def point_latest(root: Path, step: int) -> None:
    write_text_whole(root / LATEST, f"{PREFIX}{step}")


def finished(root: Path) -> list[Path]:
    """The whole checkpoints under `root`, oldest first."""
    found = [path for path in root.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def newest(root: Path) -> Path | None:
    """The checkpoint to resume from: the one that `latest` names, or the newest whole one if that is gone."""
    pointer = root / LATEST
    if pointer.is_file():
        named = root / pointer.read_text().strip()
        if (named / STATE).is_file():
            return named
    whole = [path for path in finished(root) if (path / STATE).is_file()]
    return whole[-1] if whole else None


def rotate(root: Path, *, keep: int, max_gib: float) -> None:
    """Deletes the oldest steps, checkpoint and HF export together, until few and small enough are left.

    Called after a checkpoint was written, and never deletes the newest: there is something to resume from at all times.
    """
    there = _by_age(root)
    while len(there) > 1 and (len(there) > keep or sum(map(_gib, there)) > max_gib):
        for path in there.pop(0):
            aside = path.rename(path.with_name(f".{path.name}.old"))  # half a deletion is not half a checkpoint
            shutil.rmtree(aside)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=1))


def read_state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BackendError(f"the checkpoint {folder} cannot be read: {error}") from None


def _by_age(root: Path) -> list[list[Path]]:
    """The folders of each step, oldest first; by time, because an earlier run may have left higher steps."""
    steps: dict[int, list[Path]] = {}
    for path in root.glob(f"{PREFIX}*"):
        if match := STEP.fullmatch(path.name):
            steps.setdefault(int(match[1]), []).append(path)
    in_order = sorted(steps.items(), key=lambda item: (max(path.stat().st_mtime_ns for path in item[1]), item[0]))
    return [paths for _, paths in in_order]


def _replaced(folder: Path, *, whole_model: bool) -> list[Path]:
    """An older export in the folder of a new one, what marks it first."""
    model = ("config.json", "model.safetensors.index.json", "model*.safetensors") if whole_model else ()
    names = (*model, "adapter_config.json", "adapter_model*.safetensors", "head_config.json")
    return [path for name in names for path in folder.glob(name)]


def _gib(folders: list[Path]) -> float:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()) / GIB


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
