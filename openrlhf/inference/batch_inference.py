"""The batch_inference command: generate or score answers for a whole dataset, and write them to one file.

`produce` reads and checks the input, calls `generate` or `score` to produce the rows, and writes the output. Finished
rows are stored in a folder next to the output (see `parts`), so that the same command resumes an interrupted run. If a
launcher starts several processes, each produces some of the rows, and the first process writes the output.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.data.answers import iteration_slice, read_answers
from openrlhf.data.rows import announce
from openrlhf.data.sources import load_dataset
from openrlhf.errors import counted
from openrlhf.inference.generate import generate, plan_generation
from openrlhf.inference.parts import OutputParts
from openrlhf.inference.postprocess import POST_PROCESSORS, ScoredRow
from openrlhf.inference.score import score
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import is_main_process, say
from openrlhf.training.processes import join_process_group
from openrlhf.training.rng import seed_everything

CHECK_EVERY, GRACE = 1, 10  # seconds between checks of the launcher, and seconds to exit after its death
BARRIER_TIMEOUT = timedelta(days=7)  # a process may finish long before the others


@dataclass(frozen=True)
class BatchResult:
    """Result of a finished run."""

    output_path: Path
    rows: int


def run(config: BatchInferenceConfig) -> BatchResult | None:
    """Generate or score all rows, write the output and print its path; the config must already be checked."""
    result = produce(config)
    if result is not None:
        say(f"saved {result.output_path}: {counted(result.rows, 'row')}")
    return result


def produce(config: BatchInferenceConfig) -> BatchResult | None:
    """Generate or score all rows, and write the output.

    With several processes, only the main process returns the result; the others return None.
    """
    disable_progress_bar()
    exit_with_launcher()
    seed_everything(config.task.seed, deterministic=config.task.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    records = load_dataset(config.data, seed=config.task.seed, loading=config.model)
    records, first = iteration_slice(records, config.task.iter, config.task.rollout_batch_size)
    output = Path(str(config.task.output_path)).expanduser()
    # Read and check all input before `OutputParts` writes anything.
    if config.task.eval_task == "rm":
        answers = announce(read_answers(records, tokenizer, config)).rows
        parts = OutputParts(output, config, total=len(answers))
        make_rows = partial(score, config, answers, parts, tokenizer)
    else:
        generation = plan_generation(config, tokenizer, records, first)
        samples = generation.samples
        parts = OutputParts(output, config, total=len(generation.prompts) * samples, group=samples)
        make_rows = partial(generate, generation, parts, tokenizer)
    with parts.lock:
        with parts.file:
            if parts.found:
                say(f"resuming: {len(parts.found)} of {parts.total} rows are already in {parts.folder}")
            try:
                make_rows()
            except KeyboardInterrupt:
                say(f"stopped; the finished rows are in {parts.folder}: run the same command to resume")
                raise
        wait_for_all_processes()
        return finish(config, parts) if is_main_process() else None


def finish(config: BatchInferenceConfig, parts: OutputParts) -> BatchResult:
    """Write the rows to the output in order; apply --post_processor to scored rows first."""
    rows = parts.rows()
    if config.task.eval_task == "rm":
        scored = cast("list[ScoredRow]", list(rows))  # written by `score`
        rewards = [row["reward"] for row in scored]
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        say(f"reward: mean {mean:.4f}, std {std:.4f} over {counted(len(scored), 'row')}")
        process = POST_PROCESSORS.get(config.task.post_processor or "null")
        rows = process(scored, config.task) if process else scored
    return BatchResult(parts.output, parts.finish(rows))


def exit_with_launcher() -> None:
    """Exit this process soon after its launcher dies.

    Otherwise the processes of a killed launcher would keep running. They would write to the same files as a restarted
    run and then wait days for each other without releasing their GPUs.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(CHECK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)  # handled like Ctrl-C, except while waiting in the barrier
        time.sleep(GRACE)
        os._exit(1)

    if world_size() > 1:
        threading.Thread(target=watch, daemon=True, name="openrlhf-launcher").start()


def wait_for_all_processes() -> None:
    """Block until every process of the launcher has reached this call."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    join_process_group("gloo", BARRIER_TIMEOUT)
    try:
        dist.barrier()
    finally:
        dist.destroy_process_group()
