"""Kill processes of RL runs on Ray with vLLM: driver, rank, engine, reward worker and Ray's head, at random moments.

Each run has its own private Ray. A killed engine or reward worker is replaced and the run continues; after the other
kills it ends with an error that names the cause, and is resumed. In all cases, each prompt must be trained exactly
once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from openrlhf.cluster.reaper import KEPT, PREFIX
from tests.cluster.ray_runs import ON_RAY
from tests.commands import as_argv
from tests.rl.toy_task import make_prompts, task_flags
from tests.tiny import make_model
from tests.warm import kill, warm_children
from tools.drill import programs
from tools.drill.outcome import Lost, Outcome, try_all
from tools.drill.rl_runs import metrics_of

STEPS, PROMPTS, SAMPLES = 3, 24, 4
TARGETS = {  # text in the command line of the process
    "driver": "",
    "rank": "ray::ModelWorker",
    "engine": "ray::EngineWorker",
    "reward worker": "openrlhf.agents.sandbox.worker",
    "head": "gcs_server",
}
VLLM_SHAPE = {"head_dim": 32}  # the smallest that vLLM's attention supports on a CPU
KINDS: tuple[dict[str, object], ...] = ({}, {"async_train": True, "async_queue_size": 1})
RHYTHM = {"save_steps": 1, "max_ckpt_num": 2, "save_path": "./out", "ckpt_path": "./ckpt", "vllm_num_engines": 1}
EXPECTED = {"out", "ckpt", "tmp", programs.OUTPUT}


@dataclass(frozen=True)
class RayKill:
    """A kill of one process of a run, at this share of its duration."""

    number: int
    target: str
    share: float

    @property
    def kind(self) -> dict[str, object]:
        return KINDS[self.number // len(TARGETS) % len(KINDS)]


def start(task: Path, folder: Path, **flags: object) -> subprocess.Popen[bytes]:
    """Start or resume a run in its folder; Ray puts its own folders next to those of the run."""
    prompts, reward = task / "prompts.jsonl", task / "reward.py"
    paths = {"pretrain": str(task / "model"), "prompt_data": str(prompts), "remote_rm_url": str(reward)}
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *as_argv(ON_RAY | RHYTHM | paths | flags)]
    return programs.start(folder, words, RAY_TMPDIR=str(folder), **warm_children())


def drill_ray_kills(folder: Path, count: int, seed: int) -> Outcome:
    """Kill each target in turn, in synchronous and asynchronous runs."""
    make_model(folder / "model", **VLLM_SHAPE)
    task_flags(folder, make_prompts(PROMPTS))
    reference = folder / "0"
    seconds = programs.finish(start(folder, reference), reference)
    must_train_each_once(reference)
    rng = random.Random(f"ray {seed}")
    targets = list(TARGETS)
    kills = [RayKill(number, targets[number % len(targets)], rng.random()) for number in range(count)]

    def drill(one: RayKill) -> None:
        here = folder / f"{one.number + 1:x}"  # a short path, because the paths of Ray's sockets are limited
        before = programs.shared_files()
        process = start(folder, here, **one.kind)
        programs.wait_seconds(process, one.share * seconds)
        kill_target(process, here, one.target)
        if not finishes(process, here, one.target):
            programs.must_end(here)
            programs.finish(start(folder, here, load_checkpoint=True, **one.kind), here)
        programs.must_end(here)
        must_train_each_once(here)
        programs.must_leave_no_files(here, before)
        kept = {path.parent.name for path in here.glob(f"{PREFIX}*/{KEPT}")}  # logs of a run that failed
        if left := sorted({path.name for path in here.iterdir()} - EXPECTED - kept):
            raise Lost(f"left behind: {', '.join(left)}")

    return try_all({f"{one.target}, run {one.number + 1}, at {one.share:.0%}": one for one in kills}, drill)


def kill_target(process: subprocess.Popen[bytes], folder: Path, target: str) -> None:
    """Kill the target as soon as it exists; the whole run may end before that."""
    if target == "driver":
        if process.poll() is None:
            kill(process.pid)
        return
    while process.poll() is None:
        for one in programs.processes_of(folder):
            with suppress(psutil.Error, ProcessLookupError):
                if TARGETS[target] in " ".join(one.cmdline()):
                    os.kill(one.pid, signal.SIGKILL)
                    return
        time.sleep(0.02)


def finishes(process: subprocess.Popen[bytes], folder: Path, target: str) -> bool:
    """Wait for the end of a run that lost a process; return whether it finished. A run that ends too late is lost."""
    killed = time.monotonic()
    code = process.wait(programs.WATCHDOG)
    seconds = time.monotonic() - killed
    if code == 0:
        return True
    if seconds > programs.GRACE:
        raise Lost(f"it ended only {seconds:.0f} s after the kill: {programs.last_line(folder)}")
    if target != "driver" and "openrlhf: error: " not in programs.read_output(folder):
        raise Lost(f"exit code {code} without a cause: {programs.last_line(folder)}")
    return False


def must_train_each_once(folder: Path) -> None:
    """Check the recorded rollouts: every sample of every prompt, and every step, exactly once."""
    files = sorted((folder / "out" / "run" / "rollouts").glob("step_*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["prompt"]).to_pylist()]
    trained = Counter(row["prompt"]["index"] for row in rows)
    if trained != dict.fromkeys(range(PROMPTS), SAMPLES):
        wrong = {prompt: trained[prompt] for prompt in range(PROMPTS) if trained[prompt] != SAMPLES}
        raise Lost(f"samples trained per prompt, expected {SAMPLES}: {wrong}")
    steps = [row["step"] for row in metrics_of(folder) if row["kind"] == "train"]
    if steps != list(range(1, STEPS + 1)):
        raise Lost(f"the steps in the metrics are {steps}")
