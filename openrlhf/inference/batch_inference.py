"""The batch_inference command: generate or score answers for a whole dataset and write one file of rows.

`plan` decides which rows to make, `generate` or `score` makes them, and `finish` assembles the output. Finished rows
are stored in a folder beside the output (see `parts`), so an interrupted run resumes with the same command.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.data.records import Records
from openrlhf.data.sources import load_dataset_rows
from openrlhf.inference.generate import generate, plan_generation
from openrlhf.inference.parts import Parts, end_with_launcher, wait_for_everyone
from openrlhf.inference.postprocess import POST_PROCESSORS, Conditioning
from openrlhf.inference.score import plan_scoring, score
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import is_main_process, say
from openrlhf.training.device import seed_everything


@dataclass(frozen=True)
class BatchResult:
    """Outcome of a finished run: the output file and its row count; for scoring, also the reward's mean and std."""

    output_path: Path
    rows: int
    reward_mean: float | None = None
    reward_std: float | None = None


def run(config: BatchInferenceConfig) -> BatchResult | None:
    """Make every row of the output and write it.

    The config must already be checked. With several processes, only the main one returns the result; the others
    return None.
    """
    disable_progress_bar()
    end_with_launcher()
    seed_everything(config.task.seed, deterministic=config.task.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    parts, work = plan(config, tokenizer, load_rows(config))
    with parts:
        if parts.found:
            say(f"going on: {len(parts.found)} of {parts.total} rows are in {parts.folder}")
        try:
            work()
        except KeyboardInterrupt:
            say(f"stopped; {parts.folder} holds what is finished: the same command goes on from there")
            raise
    wait_for_everyone()
    return finish(config, parts) if is_main_process() else None


def plan(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, records: Records
) -> tuple[Parts, Callable[[], None]]:
    """Return the output rows to fill and a function that fills them.

    All input is read and checked before `Parts` writes anything.
    """
    output = Path(str(config.task.output_path)).expanduser()
    if config.task.eval_task == "rm":
        answers = plan_scoring(config, tokenizer, records)
        parts = Parts(output, config, total=len(answers))
        return parts, lambda: score(config, answers, parts, tokenizer)
    generation = plan_generation(config, tokenizer, records)
    parts = Parts(output, config, total=generation.num_rows, group=generation.samples)
    return parts, lambda: generate(generation, parts, tokenizer)


def load_rows(config: BatchInferenceConfig) -> Records:
    """Load the records of --dataset, mixed and limited as the flags say."""
    data = config.data
    return load_dataset_rows(
        str(data.dataset),
        split=data.dataset_split,
        probs=None if data.dataset_probs is None else [float(share) for share in data.dataset_probs.split(",")],
        max_samples=data.max_samples,
        seed=config.task.seed,
        use_ms=config.model.use_ms,
        trust_remote_code=config.model.trust_remote_code,
    )


def finish(config: BatchInferenceConfig, parts: Parts) -> BatchResult:
    """Write the rows to the output in order, after applying --post_processor to scored rows."""
    if config.task.eval_task != "rm":
        count = parts.finish(parts.rows())
        say(f"saved {parts.output}: {count} rows")
        return BatchResult(parts.output, count)
    rows = list(parts.rows())
    mean, std = reward_statistics(rows)
    say(f"reward: mean {mean:.4f}, std {std:.4f} over {len(rows)} rows")
    processor = config.task.post_processor
    if processor not in (None, "null"):
        how = Conditioning(config.task.reward_template, config.task.normalize_reward)
        rows = POST_PROCESSORS[processor](rows, how)
    count = parts.finish(rows)
    say(f"saved {parts.output}: {count} rows")
    return BatchResult(parts.output, count, mean, std)


def reward_statistics(rows: list[Any]) -> tuple[float, float]:
    """Return the mean and the unbiased standard deviation of the rewards (0 for a single row)."""
    rewards = [row["reward"] for row in rows]
    return statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
