"""Folders that appear complete or not at all.

`writing` and `exporting` yield a hidden folder with a random name next to the target. The caller fills it, alone or
together with other ranks. The folder is then flushed to disk and renamed or moved into place, so a crash never leaves a
folder that looks complete but is not. `remove_leftovers` deletes the hidden folders of a crashed run. The supervised
loop, the RL driver and `lora_combiner` write all models and checkpoints this way.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.errors import BackendError, DiskError, OpenRLHFError
from openrlhf.training.card_file import keep_readme
from openrlhf.training.disk_space import disk_failure, flush
from openrlhf.training.manifest import make_private, write_manifest

# Hidden folders of this module and of `checkpoint.rotate`; group 1 is the name of the target. Older versions used .old,
# and no random suffix.
LEFTOVER = re.compile(r"\.(.*)\.(writing|exporting|replaced|deleting|old)(-[0-9a-f]+)?")
MARKERS = ("config.json", "adapter_config.json")  # Transformers and PEFT recognise a model by these files
COMPLETE, NO_SPACE, FAILED = range(3)  # outcomes that process 0 broadcasts


class Ranks:
    """The processes that write a folder together: by default this one alone, else those of a `TrainBackend`."""

    process = 0
    num_processes = 1

    def barrier(self) -> None:
        """Wait for the other processes, if there are any."""

    def agree(self, number: int) -> int:
        """Broadcast the number that process 0 passes, which must be below 2**53, and return it."""
        return number


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
        raise error or BackendError("process 0 could not write its files: see the error of that process")


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
