"""Save the trained model even if the disk is full or read-only.

Before training starts, `warn_if_too_full` checks the free space, and `warn_if_replaced` looks for an earlier model.
`FinalSave` saves the trained model in --save_path or, if that fails, in another folder. If no disk has room, it waits
and retries.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from openrlhf.config.commands import TrainingConfig
from openrlhf.config.flags import flag_values
from openrlhf.errors import DiskError
from openrlhf.monitor import say
from openrlhf.training.atomic_folder import MARKERS, Ranks, begin_export, finish_export
from openrlhf.training.disk_space import bytes_free, show

PAUSE, RETRIES = 10.0, 60  # seconds between attempts when no disk has room; number of attempts


def model_bytes(config: TrainingConfig) -> int:
    """Return the size of the files that the model is loaded from; 0 for adapters, or if the files are not local."""
    if flag_values(config)["lora_rank"]:
        return 0
    name = str(config.model.pretrain)
    cached = try_to_load_from_cache(name, "config.json") if not Path(name).exists() else None
    source = Path(cached).parent if isinstance(cached, str) else Path(name).expanduser()
    return sum(file.stat().st_size for file in source.glob("*.safetensors"))


def warn_if_too_full(config: TrainingConfig) -> None:
    """Print a line if the model will probably not fit on the disk of --save_path."""
    folder, needed = Path(config.checkpoints.save_path), model_bytes(config)
    free = bytes_free(folder)
    if needed > free:
        say(
            f"the model will not fit in --save_path {folder}: it needs {show(needed)}, but {show(free)} are free."
            f" Try: make room while the run trains, or another --save_path"
        )


def warn_if_replaced(config: TrainingConfig) -> None:
    """Print a line if --save_path holds a model that this run will replace; not for a resumed run's own model."""
    folder = Path(config.checkpoints.save_path)
    names = MARKERS[1:] if config.lora.lora_rank else MARKERS  # an adapter does not replace a full model
    if not config.checkpoints.load_checkpoint:
        warn_of_model("save_path", folder, names)


def warn_of_model(flag: str, folder: Path, names: Sequence[str] = MARKERS) -> None:
    """Print a line if a flag's folder contains one of these files, by which a model is recognised."""
    if any((folder / name).exists() for name in names):
        say(f"--{flag} {folder} has a model, which this run will replace. Try: another --{flag} to keep it")


class FinalSave:
    """Attempts to save a trained model; the caller fills the folder of each attempt until one succeeds.

        saving = FinalSave(folder, fallback, ranks)
        for attempt in saving.attempts():
            with attempt as aside:
                export(aside)
        saving.must_be_in_place()

    The attempts use `folder`, `fallback` and a temporary folder of this machine, and then `folder` again until there
    is room. All `ranks` make the same attempts.
    """

    def __init__(self, folder: Path, fallback: Path, ranks: Ranks | None = None) -> None:
        self.folder = folder
        self.fallback = fallback
        self.ranks = ranks or Ranks()
        self.saved: Path | None = None
        self.failure = ""  # why the last attempt failed

    def attempts(self) -> Iterator[AbstractContextManager[Path]]:
        """Yield contexts that each yield a folder to fill; raise DiskError if the model cannot be saved anywhere."""
        for place in self._places():
            try:
                aside = begin_export(place, self.ranks)
            except DiskError as error:
                self.failure = str(error)
                continue
            yield self._attempt(aside, place)
            if self.saved:
                return
        raise DiskError(f"the trained model could not be saved in {self.folder}: {self.failure}")

    def must_be_in_place(self) -> None:
        """Raise DiskError if the model was not saved in the requested folder."""
        if self.saved != self.folder:
            raise DiskError(
                f"--save_path {self.folder} could not be written: the trained model is in {self.saved}",
                try_this=f"cp -r {self.saved}/. {self.folder}, once there is room",
            )

    def _places(self) -> Iterator[Path]:
        yield self.folder
        say(f"the model could not be saved in {self.folder}: {self.failure}. Trying {self.fallback}")
        yield self.fallback
        if self.ranks.process == 0:
            temporary = Path(tempfile.mkdtemp(prefix="openrlhf-"))
            say(f"the model could not be saved in {self.fallback} either: {self.failure}. Trying {temporary}")
            yield temporary / self.folder.name
            with suppress(OSError):
                temporary.rmdir()
        else:
            yield self.folder  # only process 0 writes
        say(
            f"the model could not be saved anywhere: {self.failure}. Make room for it in {self.folder}: the run"
            f" retries every {PAUSE:.0f} seconds, up to {RETRIES} times"
        )
        for _ in range(RETRIES):
            time.sleep(PAUSE)
            yield self.folder

    @contextmanager
    def _attempt(self, aside: Path, place: Path) -> Iterator[Path]:
        try:
            with finish_export(aside, place, self.ranks):
                yield aside
                if self.ranks.process == 0 and not any((aside / name).exists() for name in MARKERS):
                    raise DiskError(f"the model's files are not in {aside}: the folder may be on another machine")
            self.saved = place
        except DiskError as error:
            self.failure = str(error)
