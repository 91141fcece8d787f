"""Records of a run: each trained sample with its tokens, log-probs, reward and advantage, as JSON lines.

The controller writes one file per step through `Recorder`, and `Replay` serves such files as the rollouts of another
run. A checkpoint stores the queue of rollouts that are not trained yet in a similar format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.rl.experience import Experience
from openrlhf.rl.rollouts import Rollout
from openrlhf.types import Prompt, Trajectory

FOLDER = "rollouts"
STEP_FILE, STEP_FILES = "step_{:06d}.jsonl", "step_*.jsonl"


class Recorder:
    """Writes `run_dir/rollouts/step_000001.jsonl`, one line per sample; `datasets` can read the folder directly.

    Files of steps after `resumed_at` are deleted, as they are from the metrics: the folder describes a single run.
    """

    def __init__(self, run_dir: Path | None, decode: Any = None, resumed_at: int = 0) -> None:
        self.folder = run_dir / FOLDER if run_dir else None
        self.decode = decode
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = {STEP_FILE.format(step) for step in range(1, resumed_at + 1)}
            for file in self.folder.glob(STEP_FILES):
                if file.name not in kept:
                    file.unlink()

    def write(self, step: int, experience: Experience) -> None:
        """Write the file of a step; do nothing without a run folder."""
        if not self.folder:
            return
        tensors = {  # [samples, tokens]
            "advantages": experience.advantages,
            "old_log_probs": experience.old_log_probs,
            "reference_log_probs": experience.reference_log_probs,
            "old_values": experience.old_values,
            "returns": experience.returns,
        }
        lines = []
        for row, item in enumerate(experience.trajectories):
            acted = [place for place, acts in enumerate(item.action_mask) if acts]
            first = acted[0] if acted else len(item.input_ids)
            rounded = {
                name: [round(value, 6) for value in tensor[row, : len(item.input_ids)].tolist()]
                for name, tensor in tensors.items()
                if tensor is not None
            }
            response = self.decode(item.input_ids[first:]) if self.decode else ""
            # The trajectory's own numbers are not rounded, so that a replay trains on exactly these.
            lines.append(json.dumps(rounded | {"step": step, **plain(item), "response": response}) + "\n")
        (self.folder / STEP_FILE.format(step)).write_text("".join(lines), encoding="utf-8")


class Replay:
    """Source of rollouts that another run recorded, in their original order; a place is the index of a file."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob(STEP_FILES))

    def __len__(self) -> int:
        return len(self.files)

    async def take(self, number: int, place: int) -> Rollout:
        lines = self.files[place].read_text(encoding="utf-8").splitlines()
        trajectories = [trajectory(json.loads(line)) for line in lines]
        version = min((item.version for item in trajectories), default=number)
        return Rollout(number, version, trajectories, place, next_place=place + 1)


def plain(item: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a dict for JSON; `asdict` would copy every single token."""
    return {**vars(item), "prompt": vars(item.prompt)}


def trajectory(line: Mapping[str, Any]) -> Trajectory:
    """Rebuild the trajectory of a recorded line."""
    known: dict[str, Any] = {name: line[name] for name in Trajectory.__dataclass_fields__ if name in line}
    prompt: dict[str, Any] = dict(line["prompt"])
    known["prompt"] = Prompt(**prompt | {"input_ids": tuple(prompt["input_ids"])})
    for name in ("input_ids", "action_mask", "rollout_log_probs", "temperature_factors"):
        known[name] = tuple(known.get(name, ()))
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
        yield Rollout(**{"place": row["next_place"]} | row)  # older checkpoints lack the place
