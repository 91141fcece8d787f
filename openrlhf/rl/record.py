"""The memory of a run: each trained sample with its tokens, log-probs, reward and advantage, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.rl.rollouts import Rollout
from openrlhf.rl.samples import Sample
from openrlhf.types import TEMPERATURE_FACTORS, Prompt, Trajectory

FOLDER = "rollouts"
STEP_FILES = "step_*.jsonl"


def step_file(step: int) -> str:
    return f"step_{step:06d}.jsonl"


class Recorder:
    """Writes `run_dir/rollouts/step_000001.jsonl`, one line per sample; `datasets` reads the folder as it is.

    What an earlier run left there after `resumed_at` is dropped, as from the metrics: the folder tells of one run.
    """

    def __init__(self, run_dir: Path | None, decode: Any = None, resumed_at: int = 0) -> None:
        self.folder = run_dir / FOLDER if run_dir else None
        self.decode = decode
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = {step_file(step) for step in range(1, resumed_at + 1)}
            for file in self.folder.glob(STEP_FILES):
                if file.name not in kept:
                    file.unlink()

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        if self.folder:
            lines = (json.dumps(self._line(step, sample)) + "\n" for sample in samples)
            (self.folder / step_file(step)).write_text("".join(lines))

    def _line(self, step: int, sample: Sample) -> dict[str, Any]:
        item = sample.trajectory
        acted = [place for place, acts in enumerate(item.action_mask) if acts]
        first = acted[0] if acted else len(item.input_ids)
        line = {"step": step, **plain(item), "response": self.decode(item.input_ids[first:]) if self.decode else ""}
        arrays = {name: [round(float(value), 6) for value in array] for name, array in sample.arrays.items()}
        return arrays | line  # what was sampled stands unrounded, so that it can be trained on again


class Replay:
    """Rollouts that another run recorded, in their order; a place is a file."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob(STEP_FILES))

    def __len__(self) -> int:
        return len(self.files)

    async def take(self, number: int, place: int) -> Rollout:
        lines = self.files[place].read_text().splitlines()
        trajectories = [trajectory(json.loads(line)) for line in lines]
        version = min((item.version for item in trajectories), default=number)
        return Rollout(number, version, trajectories, place, next_place=place + 1)


def plain(item: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON holds it; `asdict` would copy each token by itself."""
    return {**vars(item), "prompt": vars(item.prompt)}


def trajectory(line: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a recorded line."""
    known: dict[str, Any] = {name: line[name] for name in Trajectory.__dataclass_fields__ if name in line}
    prompt: dict[str, Any] = dict(line["prompt"])
    known["prompt"] = Prompt(**prompt | {"input_ids": tuple(prompt["input_ids"])})
    for name in ("input_ids", "action_mask", "rollout_log_probs", TEMPERATURE_FACTORS):
        known[name] = tuple(known.get(name, ()))
    known["step_rewards"] = tuple((place, reward) for place, reward in known["step_rewards"])
    return Trajectory(**known)


def write_queue(path: Path, queue: Iterable[Rollout]) -> None:
    """Rollouts that were made and not trained yet, beside a checkpoint."""
    rows = [
        {
            "number": rollout.number,
            "version": rollout.version,
            "place": rollout.place,
            "next_place": rollout.next_place,
            "metrics": rollout.metrics,
            "trajectories": [plain(item) for item in rollout.trajectories],
        }
        for rollout in queue
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_queue(path: Path) -> Iterator[Rollout]:
    for text in path.read_text().splitlines():
        row = json.loads(text)
        yield Rollout(
            number=row["number"],
            version=row["version"],
            trajectories=[trajectory(item) for item in row["trajectories"]],
            place=row.get("place", row["next_place"]),
            next_place=row["next_place"],
            metrics=row["metrics"],
        )
