"""A rollout: prompts in order, groups of samples for each, filtered, until there are enough or no prompts are left."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from openrlhf.agents.executor import GroupExecutor, GroupResult
from openrlhf.algo.shaping import group_is_kept
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.lockstep import Session, Turnstile
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.training.order import permutation
from openrlhf.types import Prompt, SamplingParams, Trajectory


@dataclass(frozen=True)
class PromptOrder:
    """The prompts of all episodes in one line, each episode shuffled anew: a function of seed and place."""

    prompts: Sequence[Prompt]
    episodes: int
    seed: int

    def __len__(self) -> int:
        return len(self.prompts) * self.episodes

    def take(self, start: int, count: int) -> list[Prompt]:
        """The next prompts from `start`; their index becomes their place, so that each group has its own."""
        return [replace(self.at(place), index=place) for place in range(start, min(start + count, len(self)))]

    def at(self, place: int) -> Prompt:
        episode, within = divmod(place, len(self.prompts))
        return self.prompts[int(permutation(len(self.prompts), self.seed, episode)[within])]


@dataclass(frozen=True)
class RolloutSettings:
    """How many samples, drawn how, and which groups count."""

    batch_size: int
    samples_per_prompt: int
    params: SamplingParams
    context_length: int
    seed: int
    keep_between: tuple[float, float] | None = None  # dynamic filtering
    most_episodes: int | None = None  # at a time
    most_prompts: int | None = None  # per call for generation
    lockstep: bool = True
    step_rewards: bool = False


@dataclass(frozen=True)
class Rollout:
    """What one rollout gave, from the prompts between `place` and `next_place`, where the following one begins."""

    number: int
    version: int
    trajectories: list[Trajectory]
    place: int
    next_place: int
    metrics: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    """Where rollouts come from; its length is the place at which it has no more to give."""

    def __len__(self) -> int: ...

    async def take(self, number: int, place: int) -> Rollout:
        """The rollout that begins at `place`."""
        ...


@dataclass(frozen=True)
class Generated:
    """Rollouts of the policy as it is now; a place is one in the line of prompts."""

    order: PromptOrder
    engine: Engine
    executor: GroupExecutor
    workers: Workers
    settings: RolloutSettings

    def __len__(self) -> int:
        return len(self.order)

    async def take(self, number: int, place: int) -> Rollout:
        return await roll_out(number, place, self.order, self.engine, self.executor, self.workers, self.settings)


async def roll_out(
    number: int,
    place: int,
    order: PromptOrder,
    engine: Engine,
    executor: GroupExecutor,
    workers: Workers,
    settings: RolloutSettings,
) -> Rollout:
    """Groups in prompt order; a rejected one is replaced by the next prompt, and none that was accepted is lost."""
    accepted: list[list[Trajectory]] = []
    start, failures = place, 0
    version = engine.version
    while len(accepted) < settings.batch_size and place < len(order):
        missing = settings.batch_size - len(accepted)
        prompts = order.take(place, min(missing, settings.most_prompts or missing))
        place += len(prompts)
        results = await run_groups(prompts, engine, executor, settings)
        failures += sum(len(result.failures) for result in results)
        groups = [result.trajectories for result in results]
        if settings.keep_between is not None:  # scores are needed now
            groups = [await with_model_rewards(group, workers, each_step=settings.step_rewards) for group in groups]
        accepted += [group for group in groups if keeps(group, settings)]
    consumed = place - start
    metrics = {"rollout/failures": float(failures)} if failures else {}
    if settings.keep_between is not None:
        metrics["dynamic_filtering_pass_rate"] = 100.0 * len(accepted) / consumed
    return Rollout(number, version, [item for group in accepted for item in group], start, place, metrics)


async def run_groups(
    prompts: Sequence[Prompt], engine: Engine, executor: GroupExecutor, settings: RolloutSettings
) -> list[GroupResult]:
    """The samples of all prompts side by side; past a limit, groups begin in order as others end."""
    turnstile = Turnstile(engine, settings.most_episodes, lockstep=settings.lockstep)
    doors = [turnstile.line_up(settings.samples_per_prompt, prompt.index) for prompt in prompts]

    async def run(prompt: Prompt, door: asyncio.Future[list[Session]]) -> GroupResult:
        return await executor.run_group(prompt, sampling(prompt, settings), await door)

    jobs = map(run, prompts, doors)
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sampling(prompt: Prompt, settings: RolloutSettings) -> list[SamplingParams]:
    """One set of parameters per sample: its own seed, and no more tokens than the context leaves."""
    room = settings.context_length - len(prompt.input_ids)
    longest = max(1, min(settings.params.max_tokens, room))
    return [
        replace(settings.params, max_tokens=longest, seed=seed_of(settings.seed, prompt.index, sample))
        for sample in range(settings.samples_per_prompt)
    ]


def seed_of(*numbers: int) -> int:
    """A seed for a sample that depends on nothing but its place."""
    return zlib.crc32(repr(numbers).encode())


def keeps(group: Sequence[Trajectory], settings: RolloutSettings) -> bool:
    """False for a group that carries no signal: empty, alone where a group is compared, or filtered by its scores."""
    if not group:
        return False
    if len(group) == 1 and settings.samples_per_prompt > 1:
        return False
    if settings.keep_between is None:
        return True
    scores = torch.tensor([item.score for item in group])
    return bool(group_is_kept(scores, torch.zeros(len(scores), dtype=torch.long), *settings.keep_between)[0])
