"""Construction of the executor that the reward and agent flags ask for.

`build_executor` is the only entry. It starts the worker processes that run user code and returns an `Episodes` executor
for an agent file, or a `SingleTurn` executor with the matching scorer.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.agents.episodes import Episodes
from openrlhf.agents.executor import GroupExecutor
from openrlhf.agents.http import ServerRewards
from openrlhf.agents.rewards import FileRewards, NoRewards, Scorer
from openrlhf.agents.sandbox.messages import Spec
from openrlhf.agents.sandbox.pool import Limits, Pool
from openrlhf.agents.single_turn import SingleTurn
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.rl import RewardFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PROCESSES = 8
EPISODES_BEFORE_ANOTHER = 16  # concurrent episodes in a process before another process is started


def build_executor(
    rewards: RewardFlags,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    processes: int | None = None,
    trust_remote_code: bool = False,
    template: TemplateFlags | None = None,
    compares_engine: bool = False,
) -> GroupExecutor:
    """Build the executor for an agent file, a reward file, reward servers, or none of them.

    With none of them, reward models score the samples later. A file is loaded in a first worker process immediately,
    so that errors in it surface before any training. `processes` limits the worker processes (default: half of the
    CPU cores, at most 8). `compares_engine` says that the loss compares the engine's log-probs with the trainer's.
    """
    processes = processes or max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2))
    if rewards.agent_func_path:
        pool = _agents(rewards, tokenizer, context_length, processes, trust_remote_code, template or TemplateFlags())
        return Episodes(
            pool,
            context_length=context_length,
            step_rewards=rewards.step_rewards,
            on_error=rewards.on_reward_error,
            compares_engine=compares_engine,
        )
    return SingleTurn(
        _scorer(rewards, processes), tokenizer, context_length=context_length, on_error=rewards.on_reward_error
    )


def _scorer(rewards: RewardFlags, processes: int) -> Scorer:
    """Build the scorer of single-turn samples; a reward file runs one call per process."""
    if rewards.reward_file:
        limits = Limits(rewards.reward_timeout, processes, calls_before_another=1, calls_per_process=1)
        pool = Pool(Spec(_path(rewards.reward_file), "reward"), limits)
        pool.start()
        return FileRewards(pool, stop_at_failure=rewards.on_reward_error == "stop")
    if rewards.reward_servers:
        return ServerRewards(
            rewards.reward_servers, timeout=rewards.reward_timeout, api_key=rewards.reward_api_key or None
        )
    return NoRewards()


def _agents(
    rewards: RewardFlags,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    processes: int,
    trust_remote_code: bool,
    template: TemplateFlags,
) -> Pool:
    """Start the worker pool of an agent file, which loads the tokenizer from a temporary folder that the pool owns."""
    folder = tempfile.TemporaryDirectory(prefix="openrlhf-tokenizer-")
    tokenizer.save_pretrained(folder.name)
    spec = Spec(
        _path(str(rewards.agent_func_path)),
        "agent",
        max_length=context_length,
        max_turns=rewards.max_turns,
        scored_later=rewards.scored_by_models,
        tokenizer_folder=folder.name,
        tokenizer_class=_class_of(tokenizer),
        trust_remote_code=trust_remote_code,
        template=template,
    )
    limits = Limits(rewards.reward_timeout, processes, calls_before_another=EPISODES_BEFORE_ANOTHER)
    pool = Pool(spec, limits, owns=folder)
    pool.start()
    return pool


def _class_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return module and name of the tokenizer class for a worker to import.

    AutoTokenizer takes seconds to import, so it is used only for classes from outside transformers (hub code).
    """
    kind = type(tokenizer)
    is_known = kind.__module__.startswith("transformers.")
    return (kind.__module__, kind.__qualname__) if is_known else ("transformers", "AutoTokenizer")


def _path(file: str) -> str:
    return str(Path(file).expanduser().resolve())
