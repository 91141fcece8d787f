"""Checkpoint and export folders that appear complete or not at all, in files that hold no code: safetensors, JSON.

`writing` and `exporting` yield a hidden folder next to the target. The caller fills it, alone or together with other
ranks; it is then flushed to disk and renamed or moved into place, so a crash never leaves a folder that looks complete
but is not. The supervised loop, the RL driver and `lora_combiner` write everything through them.

Under --ckpt_path, a run has one folder per step (global_step20), a file `latest` with the name of the newest, and with
--save_hf_ckpt a model folder next to each (global_step20_hf).
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.errors import BackendError

STATE = "state.json"
LATEST = "latest"
PREFIX = "global_step"
STEP = re.compile(rf"{PREFIX}(\d+)(_hf)?")
MARKERS = ("config.json", "adapter_config.json")  # files by which Transformers and PEFT recognise a model
GIB = 1024**3


class Ranks:
    """The processes that write one folder together: by default this one alone, otherwise those of a `TrainBackend`."""

    process = 0

    def barrier(self) -> None:
        """Wait for the other processes, if there are any."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


@contextmanager
def writing(folder: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; afterwards it replaces `folder` as a whole.

    All `ranks` (default: this process alone) open the context together. Process 0 creates and publishes the folder.
    """
    aside = folder.with_name(f".{folder.name}.writing")
    ranks = ranks or Ranks()
    with _filled(aside, ranks):
        yield aside
    if ranks.process == 0:
        # The older folder of the same name is deleted only after the new one is in place.
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


@contextmanager
def exporting(folder: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield a temporary folder to fill with a model; its files then move into `folder`, whose other files are kept.

    The old config.json is deleted first and the new one is moved last: a folder without it is not a model, so a
    half-moved export is never mistaken for a complete one. An older export is deleted: Transformers would prefer its
    model.safetensors to the new shards, and would put its adapter on the new weights. Exporting adapters does not
    delete a full model, which may be their base.
    """
    aside = folder.parent / f".{folder.name}.exporting"  # `with_name` would reject "."
    ranks = ranks or Ranks()
    with _filled(aside, ranks):
        yield aside
    if ranks.process == 0:
        folder.mkdir(parents=True, exist_ok=True)
        model = ("config.json", "model.safetensors.index.json", "model*.safetensors")
        adapter = ("adapter_config.json", "adapter_model*.safetensors", "head_config.json")
        replaced = (*model, *adapter) if (aside / "config.json").exists() else adapter
        for path in [path for name in replaced for path in folder.glob(name)]:
            path.unlink()
        for path in sorted(aside.iterdir(), key=lambda path: path.name in MARKERS):
            if (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            path.replace(folder / path.name)
        aside.rmdir()
    ranks.barrier()


@contextmanager
def _filled(aside: Path, ranks: Ranks) -> Iterator[None]:
    """Create the folder, let all ranks fill it in the context, and flush its files to disk."""
    if ranks.process == 0:
        shutil.rmtree(aside, ignore_errors=True)  # a crash may have left one
        aside.mkdir(parents=True)
    ranks.barrier()
    yield
    ranks.barrier()
    if ranks.process == 0:
        for path in [*aside.rglob("*"), aside]:
            _flush(path)


def point_latest(root: Path, step: int) -> None:
    """Name the checkpoint of this step as the one to resume from; the file is replaced atomically."""
    aside = root / f".{LATEST}.writing"
    aside.write_text(f"{PREFIX}{step}", encoding="utf-8")
    _flush(aside)
    aside.rename(root / LATEST)


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
    by_step: dict[int, list[Path]] = {}
    for path in root.glob(f"{PREFIX}*"):
        if match := STEP.fullmatch(path.name):
            by_step.setdefault(int(match[1]), []).append(path)
    # Oldest first by time, not by step: an earlier run may have left higher steps.
    steps = sorted(by_step, key=lambda step: (max(path.stat().st_mtime_ns for path in by_step[step]), step))
    gib = {
        step: sum(file.stat().st_size for path in by_step[step] for file in path.rglob("*") if file.is_file()) / GIB
        for step in steps
    }
    while len(steps) > 1 and (len(steps) > keep or sum(gib[step] for step in steps) > max_gib):
        for path in by_step[steps.pop(0)]:
            # Rename first: a half-deleted folder must not look like a checkpoint.
            aside = path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(aside)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the JSON part of a checkpoint; its presence marks the checkpoint as complete."""
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Return what `write_state` wrote."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BackendError(f"the checkpoint {folder} cannot be read: {error}") from None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
