"""Kill a rank or the launcher of SFT on two DeepSpeed ranks at random moments, and resume."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.commands import FAST, as_argv, free_port
from tests.tiny import make_model
from tests.toy_data import ANSWERS, answers, write_rows
from tests.warm import kill, warm_children
from tools.drill import programs
from tools.drill.outcome import Lost, Outcome, try_all
from tools.drill.rl_runs import metrics_of

TARGETS = ("rank 0", "rank 1", "launcher")
STAGES = (2, 3)  # --zero_stage
SHAPE = {"train_batch_size": 8, "micro_train_batch_size": 3, "max_epochs": 6, "learning_rate": 1e-3, "adam_eps": 1e-5}
RHYTHM = {"save_steps": 3, "eval_steps": 4, "max_ckpt_num": 2, "save_path": "./out", "ckpt_path": "./ckpt"}
CAUSE = re.compile(r"SIGKILL|exitcode|exit code|died|error", re.IGNORECASE)
# Folders of other programs: those of torchrun, which it never removes, and those in which DeepSpeed tries the compiler
# when it is imported, which a killed rank cannot remove. All of ours begin with "openrlhf".
OF_OTHERS = ("torchelastic_", "tmp")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class LaunchedKill:
    """A kill of a rank or of the launcher, at this share of the run's duration."""

    number: int
    target: str
    stage: int
    share: float


class LaunchedTask:
    """Model and rows in a folder, which all runs of the drill share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = {"dataset": write_rows(folder / "rows.jsonl", answers(19))}
        rows["eval_dataset"] = write_rows(folder / "held_out.jsonl", answers(5, seed=1))
        self.flags = FAST | SHAPE | RHYTHM | ANSWERS | rows | {"pretrain": make_model(folder / "model")}

    def start(self, folder: Path, stage: int, **flags: object) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, f"{Path(sys.executable).parent}/torchrun", "--nproc_per_node", "2"]
        given = as_argv(self.flags | {"zero_stage": stage} | flags)
        words = [*launcher, "--master_port", free_port(), "-m", "openrlhf.cli.train_sft", *given]
        return programs.start(folder, words, DS_ACCELERATOR="cpu", **warm_children())


def drill_launched_kills(folder: Path, count: int, seed: int) -> Outcome:
    """Kill each target in turn; the run must end within 30 s and resume to the uninterrupted result."""
    task = LaunchedTask(folder)
    references = {}
    for stage in STAGES[:count]:
        here = folder / f"reference_{stage}"
        references[stage] = here, programs.finish(task.start(here, stage), here)
    rng = random.Random(f"launched {seed}")
    kills = [
        LaunchedKill(number, TARGETS[number % len(TARGETS)], STAGES[number % len(STAGES)], rng.random())
        for number in range(count)
    ]

    def drill(one: LaunchedKill) -> None:
        reference, seconds = references[one.stage]
        here = folder / f"run_{one.number}"
        before = programs.shared_files()
        process = task.start(here, one.stage)
        programs.wait_seconds(process, one.share * seconds)
        if process.poll() is None:
            kill_target(process, here, one.target)
            # The ranks of a killed launcher may finish their run.
            programs.must_end(here, programs.GRACE if one.target != "launcher" else seconds + programs.GRACE)
            process.wait(programs.GRACE)
            if one.target != "launcher" and process.returncode and not CAUSE.search(programs.read_output(here)):
                raise Lost(f"no cause is shown: {programs.last_line(here)}")
        programs.finish(task.start(here, one.stage, load_checkpoint=True), here)
        programs.must_end(here)
        must_be_close(here, reference)
        programs.must_leave_no_files(here, before, OF_OTHERS)

    return try_all({f"{one.target}, ZeRO-{one.stage}, at {one.share:.0%}": one for one in kills}, drill)


def kill_target(process: subprocess.Popen[bytes], folder: Path, target: str) -> None:
    """Kill the launcher, or a rank as soon as it exists; the whole run may end before that."""
    if target == "launcher":
        kill(process.pid)
        return
    mark = f"\0LOCAL_RANK={target.removeprefix('rank ')}\0".encode()
    while process.poll() is None:
        for one in programs.processes_of(folder):
            with suppress(OSError):
                environ, words = (Path(f"/proc/{one.pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
                if mark in b"\0" + environ and b"\0openrlhf.cli.train_sft\0" in words:
                    kill(one.pid)
                    return
        time.sleep(0.02)


def must_be_close(folder: Path, reference: Path) -> None:
    """Compare metrics and weights; they may differ only by the order of sums over ranks."""
    ours, theirs = metrics_of(folder), metrics_of(reference)
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        raise Lost("the steps in the metrics differ from those of the uninterrupted run")
    for here, there in zip(ours, theirs, strict=True):
        for name, value in there.items():
            if isinstance(value, float) and abs(here[name] - value) > TOLERANCE * max(1.0, abs(value)):
                raise Lost(f"{name} at step {there['step']} is {here[name]}, without interruption {value}")
    found, expected = (load_file(path / "out" / "model.safetensors") for path in (folder, reference))
    if not all(torch.allclose(found[name], expected[name], TOLERANCE, TOLERANCE) for name in expected):
        raise Lost("the weights differ from those of the uninterrupted run")
    for state in (folder / "ckpt").glob("global_step*/state.json"):
        json.loads(state.read_text(encoding="utf-8"))
