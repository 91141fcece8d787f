"""Checkpoint and export folders that appear complete or not at all.

`writing` and `exporting` yield a hidden folder with a random name next to the target. The caller fills it, alone or
together with other ranks. The folder is then flushed to disk and renamed or moved into place, so a crash never leaves a
folder that looks complete but is not. `remove_leftovers` deletes the hidden folders of a crashed run. The supervised
loop, the RL driver and `lora_combiner` write all models and checkpoints this way. Apart from DeepSpeed's shards, the
files are safetensors and JSON, which contain no code.

Under --ckpt_path, a run has one folder per step (global_step20), a file `latest` with the name of the newest, and with
--save_hf_ckpt a model folder next to each (global_step20_hf). The state.json of a checkpoint names its run, so that
rotation and resuming never confuse two runs; its manifest.json lists sizes and checksums, which `newest` verifies.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.errors import BackendError, DiskError, OpenRLHFError
from openrlhf.monitor import say
from openrlhf.training.card_file import keep_readme
from openrlhf.training.disk_space import GIB, bytes_of, disk_failure, flush, replace_file
from openrlhf.training.manifest import MANIFEST, find_damage, make_private, write_manifest

STATE = "state.json"
LATEST = "latest"
BEST = "best"  # checkpoint of the best evaluation, in reinforcement learning
MODEL = "model"  # finished model for which --save_path had no room
PREFIX = "global_step"
CHECKPOINT = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")
STEP = re.compile(rf"{CHECKPOINT.pattern}(_hf)?")
# Hidden folders of this module; group 1 is the name of the target. Older versions used .old, and no random suffix.
LEFTOVER = re.compile(r"\.(.*)\.(writing|exporting|replaced|deleting|old)(-[0-9a-f]+)?")
MARKERS = ("config.json", "adapter_config.json")  # files by which Transformers and PEFT recognise a model
COMPLETE, NO_SPACE, FAILED = range(3)  # outcomes that process 0 broadcasts


class Ranks:
    """The processes that write one folder together: by default only this one, otherwise those of a `TrainBackend`."""

    process = 0
    num_processes = 1

    def barrier(self) -> None:
        """Wait for the other processes, if there are any."""

    def agree(self, number: int) -> int:
        """Broadcast the number that process 0 passes, which must be below 2**53, and return it."""
        return number


def new_run_id() -> str:
    return secrets.token_hex(6)


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


@contextmanager
def writing(folder: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; afterwards it replaces `folder` as a whole.

    All `ranks` (default: this process alone) open the context together. Process 0 creates and publishes the folder.
    """
    ranks = ranks or Ranks()
    suffix = f"{ranks.agree(secrets.randbits(48)):012x}"
    aside, replaced = (folder.with_name(f".{folder.name}.{kind}-{suffix}") for kind in ("writing", "replaced"))

    def publish() -> None:
        write_manifest(aside)
        for path in [*aside.rglob("*"), aside]:
            make_private(path)
            flush(path)
        # The older folder of the same name is deleted only after the new one is in place. After a crash between the
        # two renames, `remove_leftovers` puts it back.
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    _in_first(ranks, lambda: aside.mkdir(parents=True))
    try:
        yield aside
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        # Only a single process can continue after a DiskError; with several, other ranks may still wait for this one.
        if ranks.num_processes == 1 and not isinstance(error, OpenRLHFError) and (reason := disk_failure(error)):
            raise DiskError(reason) from error
        raise
    ranks.barrier()
    try:
        _in_first(ranks, publish)
    finally:
        if ranks.process == 0:
            shutil.rmtree(aside, ignore_errors=True)  # has no effect unless publishing failed


@contextmanager
def exporting(folder: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield a temporary folder to fill with a model; its files then move into `folder`, whose other files are kept.

    If process 0, which writes the files, lacks space or permission, all ranks raise DiskError together.
    """
    ranks = ranks or Ranks()
    aside = begin_export(folder, ranks)
    with finish_export(aside, folder, ranks):
        yield aside


def begin_export(folder: Path, ranks: Ranks) -> Path:
    """Create the temporary folder of an export: next to the target, or inside it if it is a mount point."""
    suffix = f"{ranks.agree(secrets.randbits(48)):012x}"
    is_disk = folder.is_dir() and folder.stat().st_dev != folder.parent.stat().st_dev
    aside = (folder if is_disk else folder.parent) / f".{folder.name}.exporting-{suffix}"  # `with_name` rejects "."
    _in_first(ranks, lambda: aside.mkdir(parents=True))
    return aside


@contextmanager
def finish_export(aside: Path, folder: Path, ranks: Ranks) -> Iterator[None]:
    """Let the caller fill `aside` with a model, then move its files into `folder`.

    The old config.json is deleted first and the new one is moved last. A folder without it is not a model, so a
    half-moved export is never mistaken for a complete one. An older export is deleted, because Transformers would
    prefer its model.safetensors to the new shards and apply its adapter to the new weights. Exporting adapters does
    not delete a full model, which may be their base.
    """

    def publish() -> None:
        for path in [*aside.rglob("*"), aside]:
            flush(path)
        folder.mkdir(parents=True, exist_ok=True)
        keep_readme(folder, aside)
        model = ("config.json", "model.safetensors.index.json", "model*.safetensors")
        adapter = ("adapter_config.json", "adapter_model*.safetensors", "head_config.json")
        is_model, is_adapter = ((aside / name).exists() for name in MARKERS)
        replaced = (*model, *adapter) if is_model else adapter if is_adapter else ()
        for path in [path for name in replaced for path in folder.glob(name)]:
            path.unlink()
        for path in sorted(aside.iterdir(), key=lambda path: path.name in MARKERS):
            if (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            path.replace(folder / path.name)
        aside.rmdir()
        flush(folder)

    try:
        try:
            yield
        except Exception as error:
            # Process 0 writes the files after all ranks have gathered the weights, so all ranks can raise DiskError
            # together. After any other failure, ranks may still wait for each other: raise, and the launcher ends them.
            if disk_failure(error):
                _raise_together(ranks, error)
            raise
        _raise_together(ranks, None)
        _in_first(ranks, publish)
    finally:
        if ranks.process == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _in_first(ranks: Ranks, work: Callable[[], object]) -> None:
    """Run `work`, which changes files, in process 0 while the others wait; if it fails, raise in all of them."""
    error: Exception | None = None
    if ranks.process == 0:
        try:
            work()
        except OSError as caught:
            error = caught
    _raise_together(ranks, error)


def _raise_together(ranks: Ranks, error: Exception | None) -> None:
    """Raise in all processes if process 0 has an error: DiskError if it could not write its files."""
    reason = None if error is None else disk_failure(error)
    outcome = ranks.agree(COMPLETE if error is None else NO_SPACE if reason else FAILED)
    if outcome == NO_SPACE:
        raise DiskError(reason or "process 0 could not write its files") from error
    if outcome == FAILED:
        raise error or BackendError("process 0 could not write its files: see its own error")


def remove_leftovers(parent: Path, is_ours: Callable[[str], object]) -> None:
    """Clean up the hidden folders that a killed run left in `parent`; call it while holding the lock.

    Hidden folders of targets that `is_ours` accepts are deleted, or renamed back if their target was being replaced.
    """
    for path in list(parent.glob(".*")):
        match = LEFTOVER.fullmatch(path.name)
        if not match or not is_ours(match[1]):
            continue
        if match[2] == "replaced" and not (parent / match[1]).exists():
            path.rename(parent / match[1])
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


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
    known = named in found and find_fault(named, only_state=True) is None
    if known:
        run = run_of(named)
        later, earlier = ([path for path in paths if run_of(path) == run] for paths in (later, earlier))
    return [*([named] if named in found else []), *earlier, *later]


def find_fault(folder: Path, *, only_state: bool = False) -> str | None:
    """Return why a run cannot resume from this checkpoint, or None; with `only_state`, look only at state.json."""
    try:
        state = read_state(folder)
    except BackendError:
        return f"{STATE} is missing or cannot be read"
    if only_state or ("run" not in state and not (folder / MANIFEST).exists()):  # written by an older version
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
