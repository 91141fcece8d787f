"""From trajectories to advantages, in the order of the formulas: rewards, penalties, shaping, KL, advantages.

The controller calls `make_experience` once per rollout. The models score the trajectories in micro-batches; all
arithmetic after that is on whole-rollout tensors [samples, tokens], padded on the right. The formulas are in
`openrlhf.algo`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from openrlhf.algo import shaping
from openrlhf.algo.advantages import ADVANTAGES, normalize
from openrlhf.algo.kl import kl_penalty
from openrlhf.algo.reduce import masked
from openrlhf.rl.samples import Batching, RolloutTokens, stack
from openrlhf.rl.workers import Workers, merge_steps
from openrlhf.types import PolicyBatch, StepRewards, Trajectory


@dataclass(frozen=True)
class ExperienceSettings:
    """How rewards become advantages; plain values from the flags."""

    estimator: str
    gamma: float
    lambd: float
    divide_by_std: bool
    kl_estimator: str
    kl_in_reward: bool
    clip_range: tuple[float, float]
    overlong: tuple[int, float, float] | None  # longest response, buffer, factor
    stop_properly: float | None
    step_rewards: bool
    scores_policy: bool  # compute the policy's own log-probs with its current weights
    old_from_engine: bool = False  # take the ratio to the log-probs that the engine sampled with


@dataclass(frozen=True)
class RolloutScores:
    """What the models say about a rollout: [samples, tokens] each; None for a model that was not asked."""

    log_probs: Tensor | None
    reference_log_probs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A rollout that is ready for training; tensors are [samples, tokens], as in `tokens`. See `PolicyBatch`."""

    trajectories: list[Trajectory]
    tokens: RolloutTokens
    advantages: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    metrics: dict[str, float]
    kl: float | None  # mean over action tokens, for the KL controller

    def batch(self, samples: Sequence[int], *, packing: bool) -> PolicyBatch:
        """Make a batch of some samples, for training."""

        def lay_out(values: Tensor | None) -> Tensor | None:
            return None if values is None else self.tokens.lay_out(values, samples, packing=packing)

        return PolicyBatch(
            **vars(self.tokens.batch(samples, packing=packing)),
            advantages=self.tokens.lay_out(self.advantages, samples, packing=packing),
            rollout_log_probs=self.tokens.lay_out(self.rollout_log_probs, samples, packing=packing),
            old_log_probs=lay_out(self.old_log_probs),
            reference_log_probs=lay_out(self.reference_log_probs),
            old_values=lay_out(self.old_values),
            returns=lay_out(self.returns),
        )


async def make_experience(
    trajectories: Sequence[Trajectory],
    workers: Workers,
    batching: Batching,
    settings: ExperienceSettings,
    kl_coef: float,
) -> Experience:
    """Score a rollout and turn its rewards into advantages."""
    trajectories = await with_model_rewards(trajectories, workers, each_step=settings.step_rewards)
    tokens = RolloutTokens.of(trajectories, batching.layout.pad_id)
    scores = await score(tokens, workers, batching, log_probs=settings.scores_policy)
    rollout_log_probs = stack([item.rollout_log_probs for item in trajectories], torch.float32)
    mask = tokens.action_mask  # [samples, tokens]
    rewards = penalised(trajectories, mask, settings)  # [samples]

    # The KL [samples, tokens] from the reference: of the trained policy, or of the one that sampled if that was scored.
    kl = None
    if scores.reference_log_probs is not None:
        own = rollout_log_probs if scores.log_probs is None else scores.log_probs
        kl = kl_penalty(own, scores.reference_log_probs, mask, settings.kl_estimator)
    kl_penalised = kl if settings.kl_in_reward else None

    if settings.step_rewards:
        penalties = shaping.spread(torch.zeros_like(rewards), kl_penalised, mask, kl_coef)
        token_rewards = penalties + step_token_rewards(trajectories, rewards, mask, settings)
    else:
        token_rewards = shaping.spread(shape(rewards, trajectories, settings), kl_penalised, mask, kl_coef)
    values = torch.zeros_like(token_rewards) if scores.values is None else scores.values  # [samples, tokens]
    estimate = ADVANTAGES[settings.estimator]
    advantages, returns = estimate(token_rewards, values, mask, settings.gamma, settings.lambd)
    if settings.estimator in shaping.WHITENED:
        advantages = normalize(advantages, mask, settings.divide_by_std)

    metrics = rollout_metrics(trajectories, rewards, token_rewards, mask)
    if kl is not None:
        metrics["kl"] = float(kl[mask].mean())
    if settings.step_rewards:
        metrics["steps"] = float(np.mean([len(item.step_rewards) for item in trajectories]))
    return Experience(
        trajectories=trajectories,
        tokens=tokens,
        advantages=advantages,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=rollout_log_probs if settings.old_from_engine else scores.log_probs,
        reference_log_probs=scores.reference_log_probs,
        old_values=scores.values,
        returns=None if scores.values is None else returns,
        metrics=metrics,
        kl=metrics.get("kl"),
    )


async def with_model_rewards(
    trajectories: Sequence[Trajectory], workers: Workers, *, each_step: bool
) -> list[Trajectory]:
    """Add rewards of the reward models to samples that have none; with `each_step`, rewards are kept per step.

    A score that an agent gave is not changed.
    """
    missing = [item for item in trajectories if math.isnan(item.reward)]
    given = await workers.rewards(missing) if missing else None
    if given is None:
        return list(trajectories)
    places = iter(range(len(missing)))

    def rewarded(item: Trajectory) -> Trajectory:
        if not math.isnan(item.reward):
            return item
        place = next(places)
        score = float(given.scores[place])
        if math.isnan(item.score):
            item = replace(item, score=score)
        if not each_step:
            return replace(item, reward=score)
        return _with_steps(item, given.steps[place], None if given.outcomes is None else float(given.outcomes[place]))

    return [rewarded(item) for item in trajectories]


def _with_steps(item: Trajectory, steps: StepRewards, outcome: float | None) -> Trajectory:
    """Reward each step of a sample; the reward of the whole sample, if any, goes to its last action token."""
    whole = () if outcome is None else ((last_action(item), outcome),)
    merged = merge_steps(steps, whole)
    return replace(item, reward=math.fsum(reward for _, reward in merged), step_rewards=merged)


async def score(tokens: RolloutTokens, workers: Workers, batching: Batching, *, log_probs: bool) -> RolloutScores:
    """Let the models score a rollout in micro-batches."""
    parts, packing = batching.cut(tokens.lengths.tolist()), batching.layout.packing
    scores = await workers.score([tokens.batch(part, packing=packing) for part in parts], log_probs=log_probs)
    return RolloutScores(
        *(
            None if tensors is None else tokens.restore(parts, tensors, packing=packing)
            for tensors in (scores.log_probs, scores.reference_log_probs, scores.values)
        )
    )


def penalised(trajectories: Sequence[Trajectory], mask: Tensor, settings: ExperienceSettings) -> Tensor:
    """Return the rewards [samples] after the penalties for overlong and truncated responses."""
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if settings.overlong is not None:
        rewards = shaping.overlong_penalty(rewards, shaping.response_lengths(mask), *settings.overlong)
    if settings.stop_properly is not None:
        truncated = torch.tensor([item.truncated for item in trajectories])
        rewards = shaping.stop_properly_penalty(rewards, truncated, settings.stop_properly)
    return rewards


def shape(rewards: Tensor, trajectories: Sequence[Trajectory], settings: ExperienceSettings) -> Tensor:
    """Return rewards [samples] relative to their group, as the estimator defines it, clipped."""
    group_ids = torch.tensor([item.prompt.index for item in trajectories])
    return shaping.clip_rewards(shaping.SHAPING[settings.estimator](rewards, group_ids), *settings.clip_range)


def step_token_rewards(
    trajectories: Sequence[Trajectory], rewards: Tensor, mask: Tensor, settings: ExperienceSettings
) -> Tensor:
    """Return the shaped step rewards [samples, tokens], each at the token where its step ends.

    The part of a sample's reward that its steps do not account for, such as a length penalty, is added to the last
    step; a sample without steps counts as one step. The steps of a group are compared with each other, not the sums
    over its samples (process supervision, arXiv 2402.03300, section 4.1.3).
    """
    given: list[tuple[int, int, float]] = []  # sample, token, reward
    for row, (item, reward) in enumerate(zip(trajectories, rewards.tolist(), strict=True)):
        steps = item.step_rewards or ((last_action(item), 0.0),)
        rest = reward - math.fsum(value for _, value in steps)
        given += [(row, place, value) for place, value in steps[:-1]]
        given.append((row, steps[-1][0], steps[-1][1] + rest))
    rows, places, values = zip(*given, strict=True)
    samples = torch.tensor(rows)  # [steps], as groups and rewards
    groups = torch.tensor([item.prompt.index for item in trajectories])[samples]
    shaped = shaping.shape_steps(settings.estimator, torch.tensor(values), groups, samples)
    clipped = shaping.clip_rewards(shaped, *settings.clip_range)
    placed = torch.zeros(mask.shape).index_put((samples, torch.tensor(places)), clipped, accumulate=True)
    return masked(placed, mask)


def last_action(item: Trajectory) -> int:
    """Return the position of the last action token, or of the last token if there is no action token."""
    return max((place for place, acts in enumerate(item.action_mask) if acts), default=len(item.action_mask) - 1)


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, token_rewards: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return the metrics to log about a rollout, including the mean of each of the agents' `extra_logs`."""
    lengths = mask.sum(1).float()
    group_ids = torch.tensor([item.prompt.index for item in trajectories])
    groups = shaping.group_stats(rewards, group_ids)
    several = groups.size > 1
    metrics = {
        "reward": float(rewards.mean()),
        "score": float(np.mean([item.score for item in trajectories])),
        "return": float(token_rewards.sum(1).mean()),
        "response_length": float(lengths.mean()),
        "total_length": float(np.mean([len(item.input_ids) for item in trajectories])),
        "truncated": float(np.mean([item.truncated for item in trajectories])),
    }
    if bool(several.any()):
        metrics["group_reward_std"] = float(groups.std[several].mean())
    names = sorted({name for item in trajectories for name in item.extra_logs})
    return metrics | {
        name: float(np.mean([item.extra_logs[name] for item in trajectories if name in item.extra_logs]))
        for name in names
    }
