"""Generate rollouts: one group of samples per prompt, in order and filtered, until a rollout is full.

The controller takes rollouts from a `RolloutSource`: `GeneratedRollouts` here, or `Replay` in `record.py`. A rollout
may be smaller than requested, or empty, when the prompts run out. Evaluation uses `run_groups` as well.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from openrlhf.agents.executor import GroupExecutor, GroupResult
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.algo.shaping import group_is_kept
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import generates_in_lockstep, most_episodes
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.monitor import Progress
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.request_batching import EpisodeScheduler, EpisodeSession
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.training.order import permutation
from openrlhf.types import Prompt, SamplingParams, Trajectory

FAILURES = "rollout/failures"  # metric: samples of a rollout that failed and were skipped


@dataclass(frozen=True)
class PromptOrder:
    """The prompts of all episodes in one sequence, shuffled again for each episode.

    The prompt at a position depends only on the seed and the position, so a resumed run gets the same prompts.
    """

    prompts: Sequence[Prompt]
    episodes: int
    seed: int

    def __len__(self) -> int:
        return len(self.prompts) * self.episodes

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return the next prompts from `start`, with their position as index, so that each group has a unique index."""
        taken = []
        for place in range(start, min(start + count, len(self))):
            episode, within = divmod(place, len(self.prompts))
            row = int(permutation(len(self.prompts), self.seed, episode)[within])
            taken.append(replace(self.prompts[row], index=place))
        return taken


@dataclass(frozen=True)
class Rollout:
    """The trajectories of one rollout, from the prompts between `place` and `next_place`."""

    number: int
    version: int  # version of the engine's weights when the rollout began
    trajectories: list[Trajectory]
    place: int
    next_place: int
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutSource(Protocol):
    """A source of rollouts; its length is the position at which it is exhausted."""

    def __len__(self) -> int: ...

    async def take(self, number: int, place: int) -> Rollout:
        """Return the rollout that begins at `place`."""
        ...


@dataclass(frozen=True)
class GeneratedRollouts:
    """Source of rollouts from the current policy; a place is a position in the prompt order."""

    order: PromptOrder
    engine: Engine
    executor: GroupExecutor
    workers: Workers
    config: RLConfig

    def __len__(self) -> int:
        return len(self.order)

    async def take(self, number: int, place: int) -> Rollout:
        """Generate groups in prompt order until --rollout_batch_size of them are accepted or the prompts run out.

        A rejected group is replaced by the next prompt's group; no accepted group is lost.
        """
        flags, each_step = self.config.rollout, self.config.rewards.step_rewards
        accepted: list[list[Trajectory]] = []
        start, failures, version = place, 0, self.engine.version
        while len(accepted) < flags.rollout_batch_size and place < len(self.order):
            missing = flags.rollout_batch_size - len(accepted)
            prompts = self.order.take(place, min(missing, flags.vllm_generate_batch_size or missing))
            place += len(prompts)
            results = await run_groups(prompts, self.engine, self.executor, self.config)
            failures += sum(len(result.failures) for result in results)
            groups = [result.trajectories for result in results]
            if flags.dynamic_filtering:  # filtering needs the scores now
                groups = [await with_model_rewards(group, self.workers, each_step=each_step) for group in groups]
            accepted += [group for group in groups if is_kept(group, flags)]
        metrics = {FAILURES: float(failures)} if failures else {}
        if flags.dynamic_filtering:
            metrics["dynamic_filtering_pass_rate"] = 100.0 * len(accepted) / (place - start)
        return Rollout(number, version, [item for group in accepted for item in group], start, place, metrics)


async def run_groups(
    prompts: Sequence[Prompt],
    engine: Engine,
    executor: GroupExecutor,
    config: RLConfig,
    progress: Progress | None = None,
) -> list[GroupResult]:
    """Run the samples of all prompts concurrently; beyond the limit, groups start in order as others end.

    `progress` counts the groups that have ended.
    """
    scheduler = EpisodeScheduler(engine, most_episodes(config), lockstep=generates_in_lockstep(config))
    groups = [scheduler.open_group(config.rollout.n_samples_per_prompt, prompt.index) for prompt in prompts]

    async def run(prompt: Prompt, group: asyncio.Future[list[EpisodeSession]]) -> GroupResult:
        params = sampling(prompt, config.rollout, config.batches.seed)
        result = await executor.run_group(prompt, params, await group)
        if progress is not None:
            progress.advance()
        return result

    return await gather_or_cancel(map(run, prompts, groups))


def sampling(prompt: Prompt, flags: RolloutFlags, seed: int) -> list[SamplingParams]:
    """Return the parameters of each sample: its own seed, and no more tokens than the context has room for."""
    room = flags.context_length - len(prompt.input_ids)
    return [
        SamplingParams(
            max_tokens=max(1, min(flags.longest_response, room)),
            temperature=flags.temperature,
            top_p=flags.top_p,
            top_k=flags.top_k,
            min_p=flags.min_p,
            min_tokens=flags.min_new_tokens,
            stop=flags.stop,
            seed=seed_of(seed, prompt.index, sample),
        )
        for sample in range(flags.n_samples_per_prompt)
    ]


def seed_of(*numbers: int) -> int:
    """Return a seed that depends only on `numbers`, such as the run's seed, the prompt and the sample."""
    return zlib.crc32(repr(numbers).encode())


def is_kept(group: Sequence[Trajectory], flags: RolloutFlags) -> bool:
    """Return False for a group without signal: empty, reduced to one sample by failures, or filtered by its scores."""
    if len(group) < min(2, flags.n_samples_per_prompt):
        return False
    if not flags.dynamic_filtering:
        return True
    scores = torch.tensor([item.score for item in group])
    one_group = torch.zeros(len(scores), dtype=torch.long)
    return bool(group_is_kept(scores, one_group, *flags.dynamic_filtering_reward_range)[0])
