"""Prompts in order, groups of samples, and the rollouts that they become.

The controller takes rollouts from a `RolloutSource`: `GeneratedRollouts` in `group_stream.py`, which decides which
groups run when, or `Replay` in `record.py`. A rollout may be smaller than requested, or empty, when the prompts run
out. Evaluation uses `run_groups`, which runs a fixed list of prompts. Both run each group with `GroupRunner.run`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from openrlhf.agents.branches import last_of_episodes
from openrlhf.agents.executor import GroupExecutor, GroupResult
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.algo.shaping import group_is_kept
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import generates_in_lockstep, most_episodes
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.monitor import Progress
from openrlhf.rl.request_batching import EpisodeScheduler
from openrlhf.rollout.engine import Engine
from openrlhf.training.order import permutation
from openrlhf.types import Prompt, SamplingParams, Trajectory

GROWTH = 4  # report skipped samples again each time their number has grown by this factor


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

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position, which is its index, so that each group has a unique one."""
        episode, within = divmod(position, len(self.prompts))
        row = int(permutation(len(self.prompts), self.seed, episode)[within])
        return replace(self.prompts[row], index=position)


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
        """Allow the rollouts from `first` (the next to be taken) to `last` to start before they are taken."""
        ...

    async def take(self, number: int, place: int) -> Rollout:
        """Return the rollout that begins at `place`."""
        ...

    async def close(self) -> None:
        """End all work in progress."""
        ...


@dataclass
class GroupRunner:
    """Runs the samples of prompts, and reports those that are skipped (--on_reward_error skip).

    The first error is printed immediately, then the count at growing intervals: a run whose reward always fails would
    otherwise look like a slow run.
    """

    executor: GroupExecutor
    tell: Callable[[str], None]  # prints a line
    samples: int = 0  # finished samples, including failed ones
    failures: int = 0
    report_at: int = 1  # number of failures at which to report again
    first: str = ""  # the first error

    async def run(self, prompt: Prompt, scheduler: EpisodeScheduler, config: RLConfig) -> GroupResult:
        """Run the samples of a prompt as soon as the scheduler has room for them."""
        params = sampling(prompt, config.rollout, config.batches.seed)
        async with scheduler.open_group(len(params), prompt.index) as sessions:
            result = await self.executor.run_group(prompt, params, sessions)
            # An executor closes its sessions before it asks for the rewards of a prompt.
            scheduler.times.rewards.append(time.perf_counter() - max(session.since for session in sessions))

        self.samples += len(last_of_episodes(result.trajectories)) + len(result.failures)
        for failure in result.failures:
            self.failures += 1
            text = " ".join(str(failure).split())  # on one line
            self.first = self.first or text
            if self.failures == self.report_at:
                self.report_at *= GROWTH
                single = f"a sample failed and is skipped (--on_reward_error skip): {text}"
                self.tell(single if self.failures == 1 else f"{self.summary}, the latest: {text}")
        return result

    @property
    def summary(self) -> str:
        return f"{self.failures} of {self.samples} samples failed and were skipped (--on_reward_error skip)"


async def run_groups(
    prompts: Sequence[Prompt], engine: Engine, runner: GroupRunner, config: RLConfig, progress: Progress | None = None
) -> list[GroupResult]:
    """Run the samples of all prompts concurrently; beyond the limit, groups start in order as others end.

    `progress` counts the groups that have ended.
    """
    scheduler = EpisodeScheduler(engine, most_episodes(config), lockstep=generates_in_lockstep(config))

    async def run(prompt: Prompt) -> GroupResult:
        result = await runner.run(prompt, scheduler, config)
        if progress is not None:
            progress.advance()
        return result

    return await gather_or_cancel(map(run, prompts))


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
