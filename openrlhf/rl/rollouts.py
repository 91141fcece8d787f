"""Generate rollouts: one group of samples per prompt, in order and filtered, until a rollout is full.

The controller takes rollouts from a `RolloutSource`: `GeneratedRollouts` here, or `Replay` in `record.py`. A rollout
may be smaller than requested, or empty, when the prompts run out. `group_stream.py` decides which groups run when.
Evaluation uses `run_groups`, which runs a fixed list of prompts.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from openrlhf.agents.branches import last_of_episodes
from openrlhf.agents.executor import GroupExecutor, GroupResult
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.algo.shaping import group_is_kept
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import generates_in_lockstep, most_episodes, staleness_limit, surplus_groups
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.monitor import Progress
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.group_stream import GroupStream, StreamCounts, StreamLimits, StreamState, version_of
from openrlhf.rl.request_batching import EpisodeScheduler
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
    """The trajectories of one rollout.

    `place` is the number of prompts that earlier rollouts used, `next_place` the number including this one: each prompt
    that was rejected, or whose samples are in a rollout, counts once.
    """

    number: int
    version: int  # version of the engine's weights when the rollout began
    trajectories: list[Trajectory]
    place: int
    next_place: int
    metrics: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)  # not in checkpoints, because they differ from run to run


class RolloutSource(Protocol):
    """A source of rollouts; its length is the position at which it is exhausted."""

    def __len__(self) -> int: ...

    def open_rollouts(self, first: int, last: int) -> None:
        """Let the rollouts from `first` (the next to be taken) to `last` begin, even before they are taken."""
        ...

    async def take(self, number: int, place: int) -> Rollout:
        """Return the rollout that begins at `place`."""
        ...

    async def close(self) -> None:
        """End all work in progress."""
        ...


class GeneratedRollouts:
    """Source of rollouts from the current policy; a place is the number of prompts that earlier rollouts used."""

    def __init__(
        self,
        order: PromptOrder,
        engine: Engine,
        executor: GroupExecutor,
        workers: Workers,
        config: RLConfig,
        state: StreamState | None = None,
    ) -> None:
        """Continue from `state`, which changes with every group; a checkpoint stores it."""
        self.order, self.engine, self.executor, self.config = order, engine, executor, config
        self.lockstep = generates_in_lockstep(config)
        self.scheduler = EpisodeScheduler(engine, most_episodes(config), lockstep=self.lockstep)
        flags = config.rollout

        async def score(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
            began = time.perf_counter()
            scored = await with_model_rewards(trajectories, workers, each_step=config.rewards.step_rewards)
            self.scheduler.times.rewards.append(time.perf_counter() - began)
            return scored

        self.stream = GroupStream(
            order,
            StreamState() if state is None else state,
            stream_limits(config),
            run=lambda prompt: run_group(prompt, self.scheduler, executor, config),
            # Filtering needs the scores now; otherwise the models score a whole rollout, in `make_experience`.
            score=score if flags.dynamic_filtering else None,
            is_kept=partial(is_kept, flags=flags),
        )

    def __len__(self) -> int:
        return len(self.order)

    def open_rollouts(self, first: int, last: int) -> None:
        if not self.lockstep:  # in lockstep, groups of one rollout run at a time, so that a run repeats exactly
            self.stream.open_rollouts(first, last)

    async def take(self, number: int, place: int) -> Rollout:
        """Generate groups until --rollout_batch_size of them are accepted or the prompts run out."""
        groups, counts = await self.stream.take(number)
        version = min(map(version_of, groups), default=self.engine.version)
        trajectories = [item for group in groups for item in group]
        metrics, times = self._metrics(counts), self.scheduler.times.lap()
        return Rollout(number, version, trajectories, place, self.stream.state.done, metrics, times)

    def _metrics(self, counts: StreamCounts) -> dict[str, float]:
        named = {
            FAILURES: counts.failures,
            "rollout/aborted_groups": counts.aborted,
            "rollout/stale_groups": counts.stale,
        }
        metrics = {name: float(count) for name, count in named.items() if count}
        judged = counts.kept + counts.rejected
        if self.config.rollout.dynamic_filtering and judged:
            metrics["dynamic_filtering_pass_rate"] = 100.0 * counts.kept / judged
        return metrics

    async def close(self) -> None:
        await self.stream.close()


def stream_limits(config: RLConfig) -> StreamLimits:
    """Return the limits of a run's stream of groups."""
    flags, asked = config.rollout, config.rollout.vllm_generate_batch_size
    surplus = surplus_groups(config)
    return StreamLimits(
        size=flags.rollout_batch_size,
        surplus=surplus,
        most_running=asked if asked is not None and asked < flags.rollout_batch_size else None,
        in_rounds=generates_in_lockstep(config),
        aborts=surplus > 0 and flags.abort_stragglers,
        max_staleness=staleness_limit(config),
    )


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

    async def run(prompt: Prompt) -> GroupResult:
        result = await run_group(prompt, scheduler, executor, config)
        if progress is not None:
            progress.advance()
        return result

    return await gather_or_cancel(map(run, prompts))


async def run_group(
    prompt: Prompt, scheduler: EpisodeScheduler, executor: GroupExecutor, config: RLConfig
) -> GroupResult:
    """Run the samples of a prompt as soon as the scheduler has room for them."""
    params = sampling(prompt, config.rollout, config.batches.seed)
    async with scheduler.open_group(len(params), prompt.index) as sessions:
        result = await executor.run_group(prompt, params, sessions)
        # An executor closes its sessions before it asks for the rewards of a prompt.
        scheduler.times.rewards.append(time.perf_counter() - max(session.since for session in sessions))
    return result


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
    group = last_of_episodes(group)
    if len(group) < min(2, flags.n_samples_per_prompt):
        return False
    if not flags.dynamic_filtering:
        return True
    return group_is_kept([item.score for item in group], *flags.dynamic_filtering_reward_range)
