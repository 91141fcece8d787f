"""Records of a run: each trained sample with its tokens, log-probs, reward and advantage, as JSON lines.

The controller writes one file per step through `Recorder`, and `Replay` serves such files as the rollouts of another
run. A record may be partial: a share of the groups, or the steps up to a size limit, as `.about.json` says. A
checkpoint stores the queue of rollouts that are not trained yet in a similar format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.errors import counted
from openrlhf.monitor import LoggedSample, say
from openrlhf.rl.experience import Experience
from openrlhf.rl.rollouts import Rollout
from openrlhf.training.disk_space import GIB, bytes_of, replace_file
from openrlhf.training.earlier_run import ABOUT_FILE, ROLLOUTS, STEP_FILE, STEP_FILES
from openrlhf.types import NOT_SAMPLED, Prompt, Trajectory

DEFAULTS = RolloutFlags()
ARRAYS = {  # the arrays of a trajectory
    "input_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "token_versions": np.int32,
    "temperature_factors": np.float32,
}
MOST_LOGGED, MOST_CHARACTERS = 8, 4000  # samples per step, and characters of a text, in dashboards


class About(TypedDict, total=False):
    """Content of `.about.json`."""

    share: float  # share of the groups that are recorded
    stopped_before_step: int  # first step for which there was no room


class Recorder:
    """Writer of `run_dir/rollouts/step_000001.jsonl`, one line per sample; `datasets` can read the folder directly.

    Recording never ends a run: at --rollout_record_gib, or when the disk is full, it stops with a message.
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
        if self.folder:
            self.limit = flags.rollout_record_gib
            self.used = bytes_of(self.folder) if self.folder.is_dir() else 0
            self._try_to_write(ABOUT_FILE, json.dumps({"share": self.share}))

    def _is_chosen(self, step: int, item: Trajectory) -> bool:
        """Return whether to record the item's group; the choice depends only on seed, step and prompt."""
        return self.share == 1 or random.Random(f"{self.seed} {step} {item.prompt.index}").random() < self.share

    def _try_to_write(self, name: str, text: str) -> bool:
        """Write a complete file; if it cannot be written, stop recording and return False."""
        assert self.folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, text)
        except OSError as error:
            self._stop(f"{self.folder} cannot be written: {error.strerror}")
            return False
        return True

    def _stop(self, reason: str) -> None:
        say(f"rollouts are no longer recorded: {reason}. Training continues")
        self.folder = None

    def write(self, step: int, experience: Experience) -> None:
        """Write the file of a step; do nothing if recording is off or has stopped."""
        if not self.folder:
            return
        tensors = {  # [tokens] over all samples
            "advantages": experience.advantages,
            "old_log_probs": experience.old_log_probs,
            "reference_log_probs": experience.reference_log_probs,
            "old_values": experience.old_values,
            "returns": experience.returns,
        }
        split = {name: experience.tokens.split(tensor) for name, tensor in tensors.items() if tensor is not None}
        lines = []
        for row, item in enumerate(experience.trajectories):
            if not self._is_chosen(step, item):
                continue
            rounded = {name: [round(value, 6) for value in parts[row].tolist()] for name, parts in split.items()}
            # The numbers of the trajectory itself are not rounded, so that a replay trains on exactly the same values.
            lines.append(json.dumps(rounded | {"step": step, **plain(item), "response": self.response(item)}) + "\n")
        if not lines:  # none of the groups was chosen; a replay cannot train on an empty file
            return
        text = "".join(lines)
        if self.used + len(text) > self.limit * GIB:  # JSON is ASCII
            about: About = {"share": self.share, "stopped_before_step": step}
            if self._try_to_write(ABOUT_FILE, json.dumps(about)):
                self._stop(f"{self.folder} has reached --rollout_record_gib {self.limit:g} at step {step}")
        elif self._try_to_write(STEP_FILE.format(step), text):
            self.used += len(text)

    def response(self, item: Trajectory) -> str:
        """Return the text from the first action token on."""
        first = int(item.action_mask.argmax()) if item.action_mask.any() else len(item.input_ids)
        return str(self.decode(item.input_ids[first:].tolist())) if self.decode else ""

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
    """Source of rollouts that another run recorded, in their original order; a place is the index of a file."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob(STEP_FILES))
        if partial := describe_gaps(folder, self.files):
            say(f"--replay {folder} is a partial record: {partial}")

    def __len__(self) -> int:
        return len(self.files)

    async def take(self, number: int, place: int) -> Rollout:
        lines = self.files[place].read_text(encoding="utf-8").splitlines()
        trajectories = [trajectory(json.loads(line)) for line in lines]
        version = min((item.version for item in trajectories), default=number)
        return Rollout(number, version, trajectories, place, next_place=place + 1)


def describe_gaps(folder: Path, files: Sequence[Path]) -> str:
    """Describe what is missing from a record; empty if nothing is missing."""
    try:
        about: About = json.loads((folder / ABOUT_FILE).read_bytes())
    except (OSError, ValueError):  # older versions recorded everything and did not write this file
        about = {}
    steps = {int(file.stem.removeprefix("step_")) for file in files}
    missing = len(set(range(1, max(steps, default=0) + 1)) - steps)
    found = [f"{about['share']:.0%} of the groups"] if about.get("share", 1) < 1 else []
    found += [f"{counted(missing, 'step')} missing"] if missing else []
    found += [f"recording stopped before step {about['stopped_before_step']}"] if "stopped_before_step" in about else []
    return ", ".join(found)


def plain(item: Trajectory) -> dict[str, object]:
    """Return a trajectory as a dict for JSON."""
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(item).items()}
    return values | {"prompt": vars(item.prompt)}


def trajectory(line: Mapping[str, Any]) -> Trajectory:
    """Rebuild the trajectory of a recorded line."""
    known: dict[str, Any] = {name: line[name] for name in Trajectory.__dataclass_fields__ if name in line}
    prompt: dict[str, Any] = dict(line["prompt"])
    known["prompt"] = Prompt(**prompt | {"input_ids": tuple(prompt["input_ids"])})
    for name, dtype in ARRAYS.items():
        if known.get(name):  # versions before 1.1 wrote an empty list for no temperature factors
            known[name] = np.array(known[name], dtype)
    if "token_versions" not in known:  # they did not write the version of each token either
        known["token_versions"] = np.where(known["action_mask"], np.int32(known["version"]), np.int32(NOT_SAMPLED))
    known["step_rewards"] = tuple((place, reward) for place, reward in known["step_rewards"])
    return Trajectory(**known)


def write_queue(path: Path, queue: Iterable[Rollout]) -> None:
    """Write the rollouts that were generated but not yet trained on, as part of a checkpoint."""
    rows = [{**vars(rollout), "trajectories": [plain(item) for item in rollout.trajectories]} for rollout in queue]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_queue(path: Path) -> Iterator[Rollout]:
    """Yield the rollouts that `write_queue` wrote."""
    for text in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        row["trajectories"] = [trajectory(item) for item in row["trajectories"]]
        yield Rollout(**{"place": row["next_place"]} | row)  # checkpoints of older versions have no `place`
