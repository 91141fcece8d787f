"""Checkpoint and export folders that appear complete or not at all, in files that hold no code: safetensors, JSON.

Everything is written to a hidden folder next to the target, flushed to disk and then renamed into place, so a crash
never leaves a folder that looks complete but is not. Used by the supervised loop, the RL driver and `lora_combiner`.
"""

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
MARKERS = ("config.json", "adapter_config.json")  # files by which Transformers and PEFT recognise a model
GIB = 1024**3


class Ranks(Protocol):
    """The processes that write one checkpoint together."""

    @property
    def process(self) -> int: ...

    def barrier(self) -> None: ...


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def write_together(ranks: Ranks, folder: Path, fill: Callable[[Path], None]) -> None:
    """Let all ranks fill a temporary folder; process 0 then flushes it to disk and renames it to `folder`."""
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
    """Rename a finished folder into place; delete an older one of the same name only after the new one is there."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def export_together(ranks: Ranks, folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a model to a temporary folder and move it file by file, so that other files in `folder` are kept.

    The old config.json is deleted first and the new one is moved last: a folder without it is not a model, so a
    half-moved export is never mistaken for a complete one. An older export is deleted: Transformers would prefer its
    model.safetensors to the new shards, and would put its adapter on the new weights. Exporting adapters does not
    delete a full model, which may be their base.
    """
    aside = _exporting(folder)
    write_together(ranks, aside, fill)
    if ranks.process == 0:
        _move_into(folder, aside)
    ranks.barrier()


def begin_export(folder: Path) -> Path:
    """Create an empty temporary folder next to `folder`; fill it and pass it to `finish_export`."""
    aside = _exporting(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def finish_export(aside: Path, folder: Path) -> None:
    """Move a filled folder into place as `export_together` does; for a single process that had others fill it."""
    flush_tree(aside)
    _move_into(folder, aside)


def _exporting(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.exporting"


def _move_into(folder: Path, aside: Path) -> None:
    """Delete an older export from `folder`, then move in the new files, marker files last."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _replaced(folder, whole_model=(aside / "config.json").exists()):
        path.unlink()
    for path in sorted(aside.iterdir(), key=lambda path: path.name in MARKERS):
        if (folder / path.name).is_dir():
            shutil.rmtree(folder / path.name)
        path.replace(folder / path.name)
    aside.rmdir()


def write_text_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    _flush(aside)
    aside.rename(path)


def point_latest(root: Path, step: int) -> None:
    write_text_whole(root / LATEST, f"{PREFIX}{step}")


def finished(root: Path) -> list[Path]:
    """List the complete checkpoints under `root`, lowest step first."""
    found = [path for path in root.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def newest(root: Path) -> Path | None:
    """Return the checkpoint to resume from: the one `latest` names, or the highest complete step if that is gone."""
    pointer = root / LATEST
    if pointer.is_file():
        named = root / pointer.read_text(encoding="utf-8").strip()
        if (named / STATE).is_file():
            return named
    whole = [path for path in finished(root) if (path / STATE).is_file()]
    return whole[-1] if whole else None


def rotate(root: Path, *, keep: int, max_gib: float) -> None:
    """Delete the oldest steps, checkpoint and HF export together, until at most `keep` steps and `max_gib` remain.

    Call after writing a checkpoint. The newest is never deleted, so there is always something to resume from.
    """
    there = _by_age(root)
    while len(there) > 1 and (len(there) > keep or sum(map(_gib, there)) > max_gib):
        for path in there.pop(0):
            # Rename first: a half-deleted folder must not look like a checkpoint.
            aside = path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(aside)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BackendError(f"the checkpoint {folder} cannot be read: {error}") from None


def _by_age(root: Path) -> list[list[Path]]:
    """Group folders by step, oldest first by time, not by step: an earlier run may have left higher steps."""
    steps: dict[int, list[Path]] = {}
    for path in root.glob(f"{PREFIX}*"):
        if match := STEP.fullmatch(path.name):
            steps.setdefault(int(match[1]), []).append(path)
    in_order = sorted(steps.items(), key=lambda item: (max(path.stat().st_mtime_ns for path in item[1]), item[0]))
    return [paths for _, paths in in_order]


def _replaced(folder: Path, *, whole_model: bool) -> list[Path]:
    """List the files of an older export that the new one replaces, marker files first."""
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
