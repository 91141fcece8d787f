"""Build the executor that the reward and agent flags select.

`build_executor` starts the worker processes for user code. It returns `AgentEpisodes` for an agent file, and otherwise
`SingleTurnSamples` with the selected source of rewards.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.agents.episodes import AgentEpisodes
from openrlhf.agents.executor import GroupExecutor
from openrlhf.agents.loading import defined_in
from openrlhf.agents.overrides import EngineLogProbs
from openrlhf.agents.reward_server import RewardServer
from openrlhf.agents.rewards import FileRewards, ServerRewards
from openrlhf.agents.sandbox.handle import PoolLimits
from openrlhf.agents.sandbox.messages import WorkerSpec
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.single_turn import SingleTurnSamples
from openrlhf.config.in_memory import find_object, is_in_memory
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.rl import RewardFlags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PROCESSES = 8  # by default


def build_executor(
    rewards: RewardFlags,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    trust_remote_code: bool = False,
    template: TemplateFlags | None = None,
    log_probs: EngineLogProbs | None = None,
    in_lockstep: bool = False,
) -> GroupExecutor:
    """Build the executor for an agent, a reward function, reward servers, or none of them.

    With none of them, reward models score the samples later. A file is loaded immediately in a first worker process, so
    that errors in it are reported before training. `in_lockstep` means that the engine answers in batches, so that the
    groups of a batch are ready at the same time.
    """
    if not rewards.agent_func_path:
        source = reward_source(rewards, in_lockstep=in_lockstep)
        return SingleTurnSamples(source, tokenizer, context_length, rewards.on_reward_error)

    spec = agent_spec(
        rewards,
        tokenizer,
        context_length=context_length,
        trust_remote_code=trust_remote_code,
        template=template or TemplateFlags(),
    )
    pool = Pool(spec, limits_of(rewards))
    pool.start()
    known = log_probs or EngineLogProbs()
    return AgentEpisodes(pool, context_length, rewards.step_rewards, rewards.on_reward_error, known)


def limits_of(rewards: RewardFlags) -> PoolLimits:
    """Return the limits of the pool; an object runs in one worker thread, because a second one would race with it."""
    processes = rewards.reward_processes or max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2))
    is_object = is_in_memory(rewards.agent_func_path or rewards.remote_rm_url)
    return PoolLimits(rewards.reward_timeout, 1 if is_object else processes)


def reward_source(rewards: RewardFlags, *, in_lockstep: bool) -> FileRewards | ServerRewards | None:
    """Return the reward function or the reward servers; None if only reward models score samples."""
    if rewards.reward_file or is_in_memory(rewards.remote_rm_url):
        pool = Pool(reward_spec(rewards), limits_of(rewards))
        pool.start()
        return FileRewards(
            pool,
            stop_at_failure=rewards.on_reward_error == "stop",
            batch_groups=rewards.reward_batch_groups,
            slots=math.inf if in_lockstep else None,  # earlier calls then do not affect grouping
        )
    if rewards.reward_servers:
        key = rewards.reward_api_key or None
        return ServerRewards([RewardServer(url, rewards.reward_timeout, api_key=key) for url in rewards.reward_servers])
    return None


def agent_spec(
    rewards: RewardFlags,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    trust_remote_code: bool,
    template: TemplateFlags,
) -> WorkerSpec:
    """Return the first message to the workers of an agent."""
    with tempfile.TemporaryDirectory(prefix="openrlhf-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        files = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    # AutoTokenizer takes seconds to import, so use it only for classes that are not part of Transformers (hub code).
    kind = type(tokenizer)
    is_known = kind.__module__.startswith("transformers.")
    agent = object_of(rewards.agent_func_path, "agent_func_path")
    return WorkerSpec(
        file_of(rewards.agent_func_path, agent),
        "agent",
        code=agent,
        max_length=context_length,
        max_turns=rewards.max_turns,
        scored_later=rewards.scored_by_models,
        tokenizer_files=files,
        tokenizer_class=(kind.__module__, kind.__qualname__) if is_known else ("transformers", "AutoTokenizer"),
        trust_remote_code=trust_remote_code,
        template=template,
    )


def reward_spec(rewards: RewardFlags) -> WorkerSpec:
    """Return the first message to the workers of a reward function."""
    function = object_of(rewards.remote_rm_url, "remote_rm_url")
    file = file_of(rewards.reward_file, function)
    return WorkerSpec(file, "reward", code=function, concurrency=rewards.reward_concurrency)


def object_of(name: str | None, flag: str) -> object | None:
    """Return the function or agent that a Python caller passed for this flag; None if the flag names something else."""
    return find_object(str(name), flag) if is_in_memory(name) else None


def file_of(path: str | None, code: object | None) -> str:
    """Return the file with the user's code: the one that the flag names, or the one that defines the object."""
    return str(Path(str(path)).expanduser().resolve()) if code is None else defined_in(code)
