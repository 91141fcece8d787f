"""Records of a run: each trained sample with its tokens, log-probs, reward and advantage, in Parquet files.

The controller writes one file per step through `Recorder`, and `Replay` serves such files as the rollouts of another
run. A record may be partial: a share of the groups, or the steps up to a size limit, as `.about.json` says. A
checkpoint stores the queue of rollouts that are not trained yet, and groups that wait for their rollout, in a similar
format.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.errors import DataError, counted
from openrlhf.monitor import LoggedSample, say
from openrlhf.rl.experience import Experience
from openrlhf.rl.group_stream import GroupSamples
from openrlhf.rl.rollouts import Rollout
from openrlhf.rl.sample_files import (
    list_column,
    read_about,
    read_samples,
    samples_of,
    text_column,
    trajectory_of,
    write_samples,
)
from openrlhf.training.disk_space import GIB, bytes_of, replace_file
from openrlhf.training.earlier_run import ABOUT_FILE, ROLLOUTS, STEP_FILE, step_files, step_of
from openrlhf.types import Trajectory

DEFAULTS = RolloutFlags()
MOST_LOGGED, MOST_CHARACTERS = 8, 4000  # samples per step and characters per text in dashboards


class About(TypedDict, total=False):
    """Content of `.about.json`."""

    share: float  # share of the groups that are recorded
    stopped_before_step: int  # first step for which there was no room


class Recorder:
    """Writer of `run_dir/rollouts/step_000001.parquet`, one row per sample; `datasets` can read the folder directly.

    Recording neither ends a run nor delays a step: files are written in a thread, and at --rollout_record_gib, or when
    the disk is full, recording stops with a message.
    """

    def __init__(
        self,
        run_dir: Path | None,
        decode: Callable[[list[int]], object] | None = None,
        flags: RolloutFlags = DEFAULTS,
        *,
        seed: int = 0,
    ) -> None:
        self.folder = run_dir / ROLLOUTS if run_dir and flags.rollout_record_share > 0 else None
        self.decode = decode
        self.share, self.seed = flags.rollout_record_share, seed
        self.limit, self.used = 0.0, 0  # GiB, bytes
        self.writing: asyncio.Task[None] | None = None  # writes the file of the last step
        if self.folder:
            self.limit = flags.rollout_record_gib
            self.used = bytes_of(self.folder) if self.folder.is_dir() else 0
            self._write_about({"share": self.share})

    def _is_chosen(self, step: int, item: Trajectory) -> bool:
        """Return whether to record the item's group; the choice depends only on seed, step and prompt."""
        return self.share == 1 or random.Random(f"{self.seed} {step} {item.prompt.index}").random() < self.share

    def _try_to_write(self, write: Callable[[Path], None], name: str) -> bool:
        """Write a complete file; if it cannot be written, stop recording and return False."""
        assert self.folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / name)
        except OSError as error:
            self._stop(f"{self.folder} cannot be written: {error.strerror}")
            return False
        return True

    def _write_about(self, about: About) -> bool:
        return self._try_to_write(lambda path: replace_file(path, json.dumps(about)), ABOUT_FILE)

    def _stop(self, reason: str) -> None:
        say(f"rollouts are no longer recorded: {reason}. Training continues")
        self.folder = None

    async def record(self, step: int, experience: Experience) -> None:
        """Wait for the file of the previous step, then start writing the samples of this step in a thread."""
        await self.flush()
        if self.folder:
            self.writing = asyncio.create_task(asyncio.to_thread(self.write, step, experience))

    async def flush(self) -> None:
        """Wait until the file of the last step is complete."""
        writing, self.writing = self.writing, None
        if writing is not None:
            await writing

    def write(self, step: int, experience: Experience) -> None:
        """Write the file of a step; do nothing if recording is off or has stopped."""
        rows = [row for row, item in enumerate(experience.trajectories) if self._is_chosen(step, item)]
        if not self.folder or not rows:  # no group was chosen: a replay cannot train on an empty file
            return
        items, bounds = [experience.trajectories[row] for row in rows], pa.array(experience.tokens.bounds, pa.int32())
        columns = {
            "step": pa.repeat(pa.scalar(step, pa.int64()), len(items)),
            "response": text_column([self.response(item) for item in items]),
        }
        for name in ("advantages", "old_log_probs", "reference_log_probs", "old_values", "returns"):
            tensor = vars(experience)[name]
            if tensor is not None:
                whole = list_column(bounds, tensor.numpy())
                columns[name] = whole if len(rows) == len(whole) else whole.take(pa.array(rows))
        name = STEP_FILE.format(step)
        if not self._try_to_write(lambda path: write_samples(path, items, columns), name):
            return
        path = self.folder / name
        size = path.stat().st_size
        if self.used + size <= self.limit * GIB:
            self.used += size
            return
        path.unlink()
        if self._write_about({"share": self.share, "stopped_before_step": step}):
            self._stop(f"{self.folder} has reached --rollout_record_gib {self.limit:g} at step {step}")

    def response(self, item: Trajectory) -> str:
        """Return the text from the first action token on."""
        if self.decode is None:
            return ""
        first = int(item.action_mask.argmax()) if item.action_mask.any() else len(item.input_ids)
        return str(self.decode(item.input_ids[first:].tolist()))

    def first_group(self, experience: Experience) -> list[LoggedSample]:
        """Return some samples of the first group for dashboards, with long texts cut."""
        items = experience.trajectories
        group = [item for item in items if item.prompt.index == items[0].prompt.index][:MOST_LOGGED]
        return [
            LoggedSample(
                prompt=item.prompt.text[-MOST_CHARACTERS:],
                response=self.response(item)[:MOST_CHARACTERS],
                reward=item.reward,
                score=item.score,
                truncated=item.truncated,
            )
            for item in group
        ]


class Replay:
    """Source of rollouts that another run recorded, in their original order; a place is the index of a file.

    `vocabulary` is the number of tokens that the policy knows.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.files, self.vocabulary = step_files(folder), vocabulary
        if partial := describe_gaps(folder, self.files):
            say(f"--replay {folder} is a partial record: {partial}")

    def __len__(self) -> int:
        return len(self.files)

    def open_rollouts(self, first: int, last: int) -> None:
        """Do nothing: files are read when they are needed."""

    async def close(self) -> None:
        """Do nothing: there is no work in progress to end."""

    async def take(self, number: int, place: int) -> Rollout:
        trajectories = await asyncio.to_thread(self.read, self.files[place])
        version = min((item.version for item in trajectories), default=number)
        return Rollout(number, version, trajectories, place, next_place=place + 1)

    def read(self, file: Path) -> list[Trajectory]:
        """Return the samples of a file; raise DataError if it is damaged, or does not fit the policy."""
        try:
            items = read_samples(file)
        except (OSError, ValueError, LookupError, TypeError, RecursionError, pa.ArrowException) as error:
            raise DataError(f"--replay {file} cannot be read: {error}") from None
        for item in items:
            factors = item.input_ids if item.temperature_factors is None else item.temperature_factors
            arrays = (item.input_ids, item.action_mask, item.rollout_log_probs, item.token_versions, factors)
            lengths = {0 if array is None else len(array) for array in arrays}
            if len(lengths) > 1 or 0 in lengths:
                raise DataError(f"--replay {file} is damaged: the arrays of a sample differ in length, or are empty")
            unknown = item.input_ids[(item.input_ids < 0) | (item.input_ids >= self.vocabulary)]
            if len(unknown):
                raise DataError(
                    f"--replay {file} has the token {unknown[0]}: the policy has {self.vocabulary}",
                    try_this="the record of a run with the same model",
                )
        return items


def describe_gaps(folder: Path, files: Sequence[Path]) -> str:
    """Describe what is missing from a record; empty if nothing is missing."""
    try:
        about: About = json.loads((folder / ABOUT_FILE).read_bytes())
    except (OSError, ValueError):  # older versions recorded everything and did not write this file
        about = {}
    steps = {step_of(file) for file in files}
    missing = len(set(range(1, max(steps, default=0) + 1)) - steps)
    found = [f"{about['share']:.0%} of the groups"] if about.get("share", 1) < 1 else []
    found += [f"{counted(missing, 'step')} missing"] if missing else []
    found += [f"recording stopped before step {about['stopped_before_step']}"] if "stopped_before_step" in about else []
    return ", ".join(found)


def write_queue(path: Path, queue: Iterable[Rollout]) -> None:
    """Write the rollouts that were generated but not yet trained on, as part of a checkpoint."""
    rollouts = list(queue)
    apart = ("trajectories", "times")
    about = [{name: value for name, value in vars(rollout).items() if name not in apart} for rollout in rollouts]
    items = [item for rollout in rollouts for item in rollout.trajectories]
    numbers = [place for place, rollout in enumerate(rollouts) for _ in rollout.trajectories]
    write_samples(path, items, {"rollout": pa.array(numbers, pa.int64())}, about)


def read_queue(path: Path) -> Iterator[Rollout]:
    """Yield the rollouts that `write_queue` wrote; a checkpoint of an older version has JSON lines instead."""
    older = path.with_suffix(".jsonl")
    if not path.exists() and older.exists():
        for text in older.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            row["trajectories"] = [trajectory_of(item) for item in row["trajectories"]]
            yield Rollout(**{"place": row["next_place"]} | row)  # versions before 1.0 did not write `place`
        return
    table = pq.read_table(path)
    items, numbers = samples_of(table), table.column("rollout").to_pylist()
    for place, about in enumerate(read_about(path)):
        own = [item for item, number in zip(items, numbers, strict=True) if number == place]
        yield Rollout(**about, trajectories=own)


def write_groups(path: Path, groups: Iterable[GroupSamples]) -> None:
    """Write accepted groups that do not belong to a rollout yet, as part of a checkpoint."""
    write_samples(path, [item for group in groups for item in group], {})


def read_groups(path: Path) -> list[GroupSamples]:
    """Read the groups that `write_groups` wrote; a checkpoint of an older version has none, and no such file."""
    items = read_samples(path) if path.exists() else []
    return [list(group) for _, group in groupby(items, key=lambda item: item.prompt.index)]
