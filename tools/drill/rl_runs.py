"""The small RL run that the drills break: one process, a model made on the spot, a reward file, eight steps.

Two kinds: a synchronous run with a critic, and an asynchronous one with a queue. Both save, rotate and evaluate. A run
in one process is deterministic, so a run that was killed and resumed must equal its reference bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import write_rows
from tools.drill import programs
from tools.drill.outcome import Lost

STEPS = 8
KINDS: dict[str, dict[str, object]] = {
    "sync": {
        "advantage_estimator": "gae",
        "init_kl_coef": 0.05,
        "enable_ema": True,
        "ema_beta": 0.8,
        "train_batch_size": 8,
        "save_hf_ckpt": True,
    },
    "async": {"async_train": True, "async_queue_size": 1, "enable_vllm_is_correction": True},
}
SHAPE = {"rollout_batch_size": 4, "train_batch_size": 16}
RHYTHM = {"save_steps": 2, "eval_steps": 3, "max_ckpt_num": 2, "save_path": "./out", "ckpt_path": "./ckpt"}
KEEP_ALL = {"max_ckpt_num": 99}  # a reference keeps all checkpoints, so that any of them can be compared


class RLTask:
    """Model, prompts and reward in a folder, which all runs of a drill share."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        held_out = write_rows(folder / "held_out.jsonl", make_prompts(3))
        task = task_flags(folder, make_prompts(STEPS * 4))
        self.flags = {"pretrain": model, "eval_dataset": held_out} | SMALL | SHAPE | RHYTHM | task

    def words(self, kind: str, **flags: object) -> list[str]:
        """Return the words that run this kind."""
        return programs.command_words("train_ppo", self.flags | KINDS[kind] | flags)

    def run_reference(self, kind: str) -> tuple[Path, float]:
        """Run without interruption; return the folder of the run and the seconds it took."""
        folder = self.folder / f"reference_{kind}"
        seconds = programs.finish(programs.start(folder, self.words(kind, **KEEP_ALL)), folder)
        return folder, seconds


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without timings, which differ between any two runs."""
    lines = (folder / "out" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if not name.startswith("timing/")} for row in rows]


def must_equal(folder: Path, reference: Path) -> None:
    """Compare model, metrics, rollouts and the last checkpoint of a finished run with the reference, bit for bit."""
    if metrics_of(folder) != metrics_of(reference):
        raise Lost("the metrics differ from those of the uninterrupted run")
    exported = [path.relative_to(reference) for path in (reference / "out").glob("*.safetensors")]
    recorded = [path.relative_to(reference) for path in (reference / "out" / "run" / "rollouts").glob("step_*.parquet")]
    latest = (reference / "ckpt" / "latest").read_text(encoding="utf-8")
    if (folder / "ckpt" / "latest").read_text(encoding="utf-8") != latest:
        raise Lost("`latest` does not name the same checkpoint as in the uninterrupted run")
    for name in [*exported, *recorded, *_content(reference, latest)]:
        if not (folder / name).is_file() or (folder / name).read_bytes() != (reference / name).read_bytes():
            raise Lost(f"{name} differs from that of the uninterrupted run")
    extra = {path.name for path in (folder / "out" / "run" / "rollouts").glob("step_*.parquet")}
    if extra != {path.name for path in recorded}:
        raise Lost("the recorded steps differ from those of the uninterrupted run")


def must_be_whole(folder: Path, reference: Path) -> None:
    """Check that everything with a final name in the folder of a killed run is complete."""
    for found in (folder / "ckpt").glob("global_step*"):
        json_files = ["config.json"] if found.name.endswith("_hf") else ["state.json"]
        for name in _content(reference, found.name):
            if not (folder / name).is_file() or (folder / name).read_bytes() != (reference / name).read_bytes():
                raise Lost(f"{name} is not complete, although its folder has its final name")
        for name in json_files:
            json.loads((found / name).read_text(encoding="utf-8"))
    if (folder / "out" / "config.json").exists():
        for path in (reference / "out").glob("*.safetensors"):
            if (folder / "out" / path.name).read_bytes() != path.read_bytes():
                raise Lost(f"out/{path.name} is not complete, although config.json is there")
    for path in (folder / "out" / "run" / "rollouts").glob("step_*.parquet"):
        if path.read_bytes() != (reference / path.relative_to(folder)).read_bytes():
            raise Lost(f"{path.name} is not complete")


def _content(reference: Path, name: str) -> list[Path]:
    """List the files of a reference's checkpoint that depend only on the training."""
    files = (reference / "ckpt" / name).rglob("*")
    return [
        file.relative_to(reference) for file in files if file.suffix == ".safetensors" or file.name == "queue.parquet"
    ]
