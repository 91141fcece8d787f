"""The checkpoints of a run: their names, which one to resume from, and which ones to delete.

Under --ckpt_path, a run has one folder per step (global_step20), a file `latest` with the name of the newest, and with
--save_hf_ckpt a model folder next to each (global_step20_hf). `atomic_folder.writing` makes each folder appear
complete. The state.json of a checkpoint names its run, so that rotation and resuming never confuse two runs; its
manifest.json lists sizes and checksums, which `newest` verifies. Apart from DeepSpeed's shards, the files are
safetensors and JSON, which contain no code.
"""

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.errors import BackendError, DiskError
from openrlhf.monitor import say
from openrlhf.training.disk_space import GIB, bytes_of, disk_failure, replace_file
from openrlhf.training.manifest import MANIFEST, find_damage

STATE = "state.json"
LATEST = "latest"
BEST = "best"  # checkpoint of the best evaluation, in reinforcement learning
MODEL = "model"  # finished model for which --save_path had no room
PREFIX = "global_step"
CHECKPOINT = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")
STEP = re.compile(rf"{CHECKPOINT.pattern}(_hf)?")


def new_run_id() -> str:
    return secrets.token_hex(6)


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a run writes a folder or file of this name to --ckpt_path."""
    return bool(STEP.fullmatch(name)) or name in (LATEST, BEST, MODEL, f"{MODEL}_critic")


def point_latest(root: Path, step: int) -> None:
    """Record this step's checkpoint in the file `latest` as the one to resume from; the file is replaced atomically."""
    try:
        replace_file(root / LATEST, f"{PREFIX}{step}")
    except OSError as error:
        raise DiskError(disk_failure(error) or str(error)) from error


def finished(root: Path) -> list[Path]:
    """List the complete checkpoints under `root`, lowest step first."""
    return sorted((path for path in root.glob(f"{PREFIX}*") if CHECKPOINT.fullmatch(path.name)), key=step_of)


def newest(root: Path) -> Path | None:
    """Return the checkpoint to resume from: the one `latest` names or, if that is damaged, the one before it.

    Only checkpoints of the same run are considered. Damaged checkpoints are reported in one line. If all are damaged,
    an error is raised, so that the run does not start over unnoticed.
    """
    reasons: list[str] = []
    for folder in _by_preference(root):
        if reason := find_fault(folder):
            reasons.append(f"{folder.name}: {reason}")
            continue
        if reasons:
            say(f"damaged checkpoint in {root}: {'; '.join(reasons)}. {folder.name} is used instead")
        if not (folder / MANIFEST).exists():
            say(f"{folder} was written by an older version, without checksums: it is not verified")
        return folder
    if reasons:
        raise BackendError(
            f"no checkpoint in {root} is intact: {'; '.join(reasons)}",
            try_this="a backup of that folder, or the same command without --load_checkpoint to start over",
        )
    return None


def _by_preference(root: Path) -> list[Path]:
    """List the checkpoints to try in order: the one that `latest` names, then earlier and later ones of its run."""
    found = finished(root)[::-1]
    pointer = root / LATEST
    if not pointer.is_file():
        return found
    text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not CHECKPOINT.fullmatch(text):
        say(f"{pointer} is ignored: expected a name like {PREFIX}20, got {text[:80]!r}")
        return found
    named = root / text
    if named not in found:
        say(f"{pointer} names {text}, which does not exist")
    later = [path for path in found if step_of(path) > step_of(named)]
    earlier = [path for path in found if step_of(path) < step_of(named)]
    with suppress(BackendError):  # the state cannot be read, so the run is not known
        run = read_state(named).get("run")
        later, earlier = ([path for path in paths if run_of(path) == run] for paths in (later, earlier))
    return [*([named] if named in found else []), *earlier, *later]


def find_fault(folder: Path) -> str | None:
    """Return why a run cannot resume from this checkpoint, or None."""
    try:
        state = read_state(folder)
    except BackendError:
        return f"{STATE} is missing or cannot be read"
    if "run" not in state and not (folder / MANIFEST).exists():  # written by an older version
        return None
    return find_damage(folder)


def rotate(root: Path, *, step: int, run: str, keep: int, max_gib: float) -> None:
    """Delete the oldest steps, checkpoint and HF export together, until at most `keep` steps and `max_gib` remain.

    Call it after writing the checkpoint of `step`. Steps of other runs and steps after this one, which the run will
    write again, are deleted first. The step itself and the one that `latest` names are never deleted.
    """
    by_step: dict[int, list[Path]] = {}
    for path in root.glob(f"{PREFIX}*"):
        if match := STEP.fullmatch(path.name):
            by_step.setdefault(int(match[1]), []).append(path)
    pointer = root / LATEST
    named = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None

    def age(other: int) -> tuple[bool, bool, int]:
        ours = other < step and run_of(step_folder(root, other)) == run
        return other == step or step_folder(root, other).name == named, ours, other

    steps = sorted(by_step, key=age)
    gib = {other: sum(map(bytes_of, by_step[other])) / GIB for other in steps}
    while len(steps) > keep or sum(gib[other] for other in steps) > max_gib:
        if not steps or age(steps[0])[0]:
            return
        for path in by_step[steps.pop(0)]:
            try:
                # Rename first: a half-deleted folder must not look like a checkpoint.
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleting-{secrets.token_hex(6)}")))
            except OSError as error:
                say(f"{path} could not be deleted: {error.strerror}")


def bytes_of_last(root: Path, run: str) -> int:
    """Return the size of this run's newest checkpoint, an estimate for the next one; 0 if there is none."""
    own = [folder for folder in finished(root) if run_of(folder) == run]
    return bytes_of(own[-1]) if own else 0


def run_of(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if the id is missing or unreadable."""
    try:
        return read_state(folder).get("run")
    except BackendError:
        return None


def write_state(folder: Path, state: Mapping[str, object]) -> None:
    """Write the JSON part of a checkpoint; its presence marks the checkpoint as complete."""
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Read the JSON part of a checkpoint."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"the checkpoint {folder} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise BackendError(f"the checkpoint {folder} cannot be read: {STATE} is not a JSON object")
    return state


def step_of(folder: Path) -> int:
    """Return the step number in the name of a checkpoint."""
    return int(folder.name.removeprefix(PREFIX))
