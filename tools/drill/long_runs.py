"""Long runs: thousands of prompts with failing rewards, thousands of steps with restarts; nothing lost or leaked."""

from __future__ import annotations

import json
import random
import signal
import statistics
import string
import subprocess
import time
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from openrlhf.rl.sample_files import read_samples
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.tiny import make_model
from tests.toy_data import write_rows
from tests.warm import kill
from tools.drill import programs
from tools.drill.outcome import Lost, Outcome
from tools.drill.rl_runs import metrics_of

SAMPLES = 2
FAILING_REWARD = """
import zlib

def reward_func(queries, prompts, labels):
    if zlib.crc32(prompts[0].encode()) % 20 == 0:
        raise RuntimeError("this reward fails for one prompt in twenty")
    return [sum(letter.islower() for letter in query) / len(query) for query in queries]
"""
PROMPT_FLAGS = {
    "async_train": True,
    "async_queue_size": 2,
    "on_reward_error": "skip",
    "n_samples_per_prompt": SAMPLES,
    "rollout_batch_size": 200,
    "train_batch_size": 400,
    "micro_train_batch_size": 100,
    "micro_rollout_batch_size": 100,
    "generate_max_len": 4,
    "save_steps": 10,
    "max_ckpt_num": 2,
    "actor_learning_rate": 1e-4,
}
STEP_FLAGS = {
    "rollout_batch_size": 1,
    "n_samples_per_prompt": SAMPLES,
    "train_batch_size": SAMPLES,
    "generate_max_len": 2,
    "save_steps": 50,
    "eval_steps": 100,
    "max_ckpt_num": 2,
    "actor_learning_rate": 1e-4,
}
RESTARTS = 4
PATHS = {"save_path": "./out", "ckpt_path": "./ckpt"}
GROWTH, MARGIN = 0.03, 24 << 20  # growth that still counts as flat: 3% plus 24 MiB
MORE_FILES = 3  # descriptors that come and go


@dataclass(frozen=True)
class Usage:
    """Resources of all processes of a run at the time it reached a step."""

    step: int
    memory: int  # bytes
    descriptors: int


def drill_many_prompts(folder: Path, count: int, seed: int) -> Outcome:
    """Train asynchronously on many prompts; a prompt survives if it was trained, or skipped, exactly once."""
    rng = random.Random(f"prompts {seed}")
    words = set()
    while len(words) < count:
        words.add("".join(rng.choices(string.ascii_lowercase, k=5)))
    rows = [{"input": word, "label": word} for word in sorted(words)]
    flags = SMALL | PROMPT_FLAGS | PATHS | task_flags(folder, rows, FAILING_REWARD)
    flags |= {"pretrain": make_model(folder / "model")}
    here = folder / "run"
    outcome = Outcome(count)
    process = programs.start(here, programs.command_words("train_ppo", flags))
    try:
        usage = watch(process, here)
        programs.finish(process, here)
        must_be_flat(usage)
    except Lost as lost:
        outcome.losses.append(str(lost))
    files = (here / "out" / "run" / "rollouts").glob("step_*.parquet")
    trained = Counter(item.prompt.label for file in files for item in read_samples(file))
    for word in sorted(words):
        expected = 0 if fails(word) else SAMPLES
        if trained[word] != expected:
            outcome.losses.append(f"prompt {word} was trained {trained[word]} times instead of {expected}")
    return outcome


def fails(prompt: str) -> bool:
    """Return whether FAILING_REWARD raises for this prompt."""
    return zlib.crc32(prompt.encode()) % 20 == 0


def drill_many_steps(folder: Path, count: int) -> Outcome:
    """Train many steps with rotation, evaluation and restarts; a step survives if it is logged exactly once."""
    held_out = write_rows(folder / "held_out.jsonl", make_prompts(3))
    flags = SMALL | STEP_FLAGS | PATHS | task_flags(folder, make_prompts(count))
    flags |= {"pretrain": make_model(folder / "model"), "eval_dataset": held_out}
    here = folder / "run"
    outcome = Outcome(count)
    before = programs.shared_files()
    try:
        for restart in range(RESTARTS + 1):
            resumed = {"load_checkpoint": True} if restart else {}
            process = programs.start(here, programs.command_words("train_ppo", flags | resumed))
            last = count * (restart + 1) // (RESTARTS + 1)
            must_be_flat(watch(process, here, last if restart < RESTARTS else None))
            if restart < RESTARTS:
                stop(process, here, kills=restart % 2 == 1)
        programs.finish(process, here)
        programs.must_end(here)
        programs.must_leave_no_files(here, before)
    except Lost as lost:
        outcome.losses.append(str(lost))
    logged = metrics_of(here)
    trained = Counter(row["step"] for row in logged if row["kind"] == "train")
    outcome.losses += [
        f"step {step} is logged {trained[step]} times" for step in range(1, count + 1) if trained[step] != 1
    ]
    evaluated = Counter(row["step"] for row in logged if row["kind"] == "eval")
    expected = range(STEP_FLAGS["eval_steps"], count + 1, STEP_FLAGS["eval_steps"])
    outcome.losses += [f"{evaluated[step]} evaluations at step {step}" for step in expected if evaluated[step] != 1]
    if (kept := len(list((here / "ckpt").glob("global_step*")))) > STEP_FLAGS["max_ckpt_num"]:
        outcome.losses.append(f"{kept} checkpoints are left")
    return outcome


def stop(process: subprocess.Popen[bytes], folder: Path, *, kills: bool) -> None:
    """Stop a run by SIGTERM or SIGKILL, in order to resume it."""
    if kills:
        kill(process.pid)
        process.wait(programs.GRACE)
    else:
        process.send_signal(signal.SIGTERM)
        programs.finish(process, folder, code=130)
    programs.must_end(folder)


def watch(process: subprocess.Popen[bytes], folder: Path, until: int | None = None) -> list[Usage]:
    """Record the usage of a run about twice a second until it ends or has reached a step."""
    found: list[Usage] = []
    metrics = folder / "out" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 4 * programs.WATCHDOG
    while programs.wait_seconds(process, 0.5):
        if time.monotonic() > deadline:
            process.kill()
            raise Lost(f"the run hangs: {programs.last_line(folder)}")
        step = last_step(metrics)
        memory = descriptors = 0
        for one in programs.processes_of(folder):
            with suppress(psutil.Error):
                memory, descriptors = memory + one.memory_info().rss, descriptors + one.num_fds()
        found.append(Usage(step, memory, descriptors))
        if until is not None and step >= until:
            break
    return found


def last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def must_be_flat(usage: list[Usage]) -> None:
    """Compare the middle of the training with its end; the beginning is loading and first allocations."""
    training = [one for one in usage if one.step > usage[0].step]
    third = len(training) // 3
    if third < 4:
        return  # the run is too short to tell
    middle, end = training[third : 2 * third], training[2 * third :]
    memory = [statistics.median(one.memory for one in part) for part in (middle, end)]
    files = [statistics.median(one.descriptors for one in part) for part in (middle, end)]
    if memory[1] > memory[0] * (1 + GROWTH) + MARGIN:
        raise Lost(f"memory grew from {memory[0] / 2**20:.0f} to {memory[1] / 2**20:.0f} MiB")
    if files[1] > files[0] + MORE_FILES:
        raise Lost(f"open descriptors grew from {files[0]:g} to {files[1]:g}")
