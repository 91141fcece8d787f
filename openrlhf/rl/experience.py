"""Compute advantages from trajectories, step by step: rewards, penalties, shaping, KL, advantages.

The controller calls `make_experience` once per rollout. The models score the trajectories in micro-batches; all later
computations use tensors [tokens] of the whole rollout. Formulas over time, which `openrlhf.algo` computes on padded
rows, get a few samples of similar length at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrlhf.agents.branches import episode_numbers
from openrlhf.algo import shaping
from openrlhf.algo.advantages import ADVANTAGES, normalize
from openrlhf.algo.kl import kl_penalty
from openrlhf.algo.reduce import masked
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import old_log_probs_are_the_engines, scores_policy
from openrlhf.config.sections.algorithm import AdvantageFlags, Estimator
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.data.collate import Layout
from openrlhf.rl.samples import Batching, RolloutTokens
from openrlhf.rl.workers import BatchScores, Workers, merge_steps
from openrlhf.types import PolicyBatch, Trajectory

CACHED_TOKENS = 2**16  # number of tokens to compute a formula for at a time
PADDED = Layout(packing=False, pad_id=0)  # [samples, longest of them], zero on padding


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A rollout that is ready for training; tensors are [tokens] over all samples; see `PolicyBatch`."""

    trajectories: Sequence[Trajectory]
    tokens: RolloutTokens
    advantages: Tensor
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    metrics: dict[str, float]
    kl: float | None  # mean over action tokens, for the KL controller

    def micro_batches(self, samples: Sequence[int], batching: Batching) -> list[PolicyBatch]:
        """Make the micro-batches of an optimizer step on the given samples."""
        values = {  # [tokens] over all samples
            "advantages": self.advantages,
            "old_log_probs": self.old_log_probs,
            "reference_log_probs": self.reference_log_probs,
            "old_values": self.old_values,
            "returns": self.returns,
        }
        batches: list[PolicyBatch] = []
        for own in batching.cut(self.tokens.sequences, samples):
            laid_out = {name: self.tokens.lay_out(tensor, own) for name, tensor in values.items() if tensor is not None}
            sampled = [self.trajectories[number].rollout_log_probs for number in own]  # [tokens] each
            laid_out["rollout_log_probs"] = self.tokens.layout.combine(sampled, 0.0)
            batches.append(self.tokens.batch(own).as_kind(PolicyBatch, **laid_out))
        return batches


async def make_experience(
    trajectories: Sequence[Trajectory], workers: Workers, batching: Batching, config: RLConfig, kl_coef: float
) -> Experience:
    """Score a rollout and turn its rewards into advantages; tensors are computed in a thread, so no agent waits."""
    rewarded = await with_model_rewards(trajectories, workers, each_step=config.rewards.step_rewards)
    tokens = RolloutTokens(rewarded, batching.layout)
    parts = await asyncio.to_thread(batching.cut, tokens.sequences)  # the samples of each micro-batch
    batches = await asyncio.to_thread(lambda: [tokens.batch(part) for part in parts])
    scored = await workers.score(batches, log_probs=scores_policy(config))
    del batches
    return await asyncio.to_thread(compute_experience, tokens, parts, scored, config, kl_coef)


def compute_experience(
    tokens: RolloutTokens, parts: Sequence[Sequence[int]], scored: BatchScores, config: RLConfig, kl_coef: float
) -> Experience:
    """Turn the rewards of a rollout into advantages; `scored` are the scores of its micro-batches `parts`."""
    trajectories, mask, flags = tokens.trajectories, tokens.action_mask, config.rewards
    # Values [tokens] of all samples, like all tensors below unless stated otherwise; None if a model is absent.
    log_probs, reference_log_probs, values = (
        None if tensors is None else tokens.restore(parts, tensors)
        for tensors in (scored.log_probs, scored.reference_log_probs, scored.values)
    )
    rollout_log_probs = torch.from_numpy(np.concatenate([item.rollout_log_probs for item in trajectories]))

    # The KL to the reference, from the log-probs of the policy or, if it did not score, the engine.
    kl = None
    if reference_log_probs is not None:
        own = rollout_log_probs if log_probs is None else log_probs
        kl = compute_kl(own, reference_log_probs, mask, config.kl.kl_estimator)
    penalty = None if config.kl.use_kl_loss else kl

    # Apply penalties, compare rewards within their group, clip them, and assign them to tokens.
    episodes = episode_numbers(trajectories)  # [samples]
    last_samples = np.empty(episodes.max() + 1, np.int64)  # [episodes]
    last_samples[episodes] = np.arange(len(episodes))
    rewards = penalised_rewards(tokens, episodes, flags, config.rollout.longest_response)  # [samples]
    group_ids = torch.tensor([item.prompt.index for item in trajectories])  # [samples]
    estimator, shaped = config.advantage.advantage_estimator, None
    if flags.step_rewards:
        steps = step_token_rewards(tokens, rewards, group_ids, estimator, flags.reward_clip_range)
        none = torch.zeros_like(rewards)
        token_rewards = shaping.spread(none, tokens.last_actions, penalty, mask, kl_coef).add_(steps)
    else:
        compared = shaping.SHAPING[estimator](rewards[last_samples], group_ids[last_samples])  # [episodes]
        shaped = compared[episodes].clamp(*flags.reward_clip_range)  # [samples]
        token_rewards = shaping.spread(shaped, tokens.last_actions, penalty, mask, kl_coef)
    outcomes = shaped if penalty is None or kl_coef <= 0 else None
    advantages, returns = compute_advantages(tokens, token_rewards, outcomes, values, config.advantage)

    metrics = rollout_metrics(tokens, last_samples, rewards, group_ids, token_rewards)
    # The mean of -log p over sampled tokens estimates the entropy without bias, and costs nothing.
    total = np.sum(rollout_log_probs.numpy(), where=mask.numpy(), dtype=np.float64)
    metrics["rollout/entropy"] = -float(total / tokens.num_actions)
    if kl is not None:
        metrics["kl"] = float(kl.sum() / tokens.num_actions)
    if flags.step_rewards:
        metrics["steps"] = float(np.mean([len(item.step_rewards) for item in trajectories]))
    return Experience(
        trajectories=trajectories,
        tokens=tokens,
        advantages=advantages,
        old_log_probs=rollout_log_probs if old_log_probs_are_the_engines(config) else log_probs,
        reference_log_probs=reference_log_probs,
        old_values=values,
        returns=returns,
        metrics=metrics,
        kl=metrics.get("kl"),
    )


def compute_kl(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Return the KL of each token, computed in parts that fit into the processor's cache."""
    kl = torch.from_numpy(np.empty(len(log_probs), np.float32))  # NumPy asks for huge pages, which are faster
    for start in range(0, len(kl), CACHED_TOKENS):
        part = slice(start, start + CACHED_TOKENS)
        kl[part] = kl_penalty(log_probs[part], reference_log_probs[part], mask[part], estimator)
    return kl


def compute_advantages(
    tokens: RolloutTokens, token_rewards: Tensor, outcomes: Tensor | None, values: Tensor | None, flags: AdvantageFlags
) -> tuple[Tensor, Tensor | None]:
    """Return advantages and, with a critic, returns; some estimators whiten the advantages over the whole rollout.

    `outcomes` are the rewards [samples] if each is that of the last action token, and other tokens have none. Without a
    discount, this is the return of every action token, and there is nothing to sum.
    """
    estimate, mask = ADVANTAGES[flags.advantage_estimator], tokens.action_mask
    returns = None
    if outcomes is not None and values is None and flags.gamma == 1.0:
        advantages = torch.from_numpy(np.repeat(outcomes.numpy(), tokens.lengths)).masked_fill_(~mask, 0.0)
    else:
        chunks = tokens.chunks()
        estimates: list[tuple[Tensor, Tensor]] = []  # advantages and returns, [samples, longest of them] each
        for samples in chunks:
            own_rewards, own_mask = (tokens.lay_out(one, samples, PADDED) for one in (token_rewards, mask))
            own_values = None if values is None else tokens.lay_out(values, samples, PADDED)
            estimates.append(estimate(own_rewards, own_values, own_mask, flags.gamma, flags.lambd))
        advantages = tokens.restore(chunks, [own for own, _ in estimates], PADDED)
        if values is not None:
            returns = tokens.restore(chunks, [own for _, own in estimates], PADDED)
    if flags.advantage_estimator in shaping.WHITENED:
        advantages = normalize(advantages, mask, not flags.no_advantage_std_norm)
    return advantages, returns


async def with_model_rewards(
    trajectories: Sequence[Trajectory], workers: Workers, *, each_step: bool
) -> list[Trajectory]:
    """Use the reward models to score samples that have no reward; with `each_step`, keep one reward per step.

    Scores set by an agent are kept. Of an episode with several trajectories, only the last one is scored.
    """
    rewarded = list(trajectories)
    if not any(math.isnan(item.reward) for item in trajectories):
        return rewarded
    episodes = episode_numbers(trajectories).tolist()
    last = dict(zip(episodes, range(len(trajectories)), strict=True))  # by episode
    missing = [place for place in last.values() if math.isnan(trajectories[place].reward)]
    given = await workers.rewards([trajectories[place] for place in missing]) if missing else None
    if given is None:
        return rewarded
    for number, place in enumerate(missing):
        item, reward = trajectories[place], float(given.scores[number])
        score = reward if math.isnan(item.score) else item.score
        steps = item.step_rewards
        if each_step:  # an outcome reward, if any, belongs to the last action token
            whole = () if given.outcomes is None else ((last_action(item), float(given.outcomes[number])),)
            steps = merge_steps(given.steps[number], whole)
            reward = math.fsum(value for _, value in steps)
        rewarded[place] = replace(item, reward=reward, score=score, step_rewards=steps)
    for place, number in enumerate(episodes):
        if place != last[number]:
            whole = rewarded[last[number]]
            rewarded[place] = replace(rewarded[place], reward=whole.reward, score=whole.score)
    return rewarded


def penalised_rewards(
    tokens: RolloutTokens, episodes: NDArray[np.int64], flags: RewardFlags, longest_response: int
) -> Tensor:
    """Return the rewards [samples] after penalties for overlong and truncated responses.

    The trajectories of an episode get the lowest of their rewards; `episodes` [samples] is the episode of each sample.
    """
    trajectories = tokens.trajectories
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if flags.overlong_buffer_len is not None:
        lengths = torch.empty(len(rewards), dtype=torch.long)  # [samples]
        for samples in tokens.chunks():
            lengths[samples] = shaping.response_lengths(tokens.lay_out(tokens.action_mask, samples, PADDED))
        penalty = flags.overlong_penalty_factor
        rewards = shaping.overlong_penalty(rewards, lengths, longest_response, flags.overlong_buffer_len, penalty)
    if flags.stop_properly_penalty_coef is not None:
        truncated = torch.tensor([item.truncated for item in trajectories])
        rewards = shaping.stop_properly_penalty(rewards, truncated, flags.stop_properly_penalty_coef)
    numbers = torch.from_numpy(episodes)
    return rewards.scatter_reduce(0, numbers, rewards, "amin", include_self=False)[numbers]


def step_token_rewards(
    tokens: RolloutTokens,
    rewards: Tensor,
    group_ids: Tensor,
    estimator: Estimator,
    clip_range: tuple[float, float],
) -> Tensor:
    """Return the shaped step rewards [tokens], each at the last token of its step.

    The difference between a sample's reward and the sum of its steps, such as a length penalty, is added to the last
    step; a sample without steps counts as one step. Rewards are compared between the steps of a group, not between
    samples (process supervision, arXiv 2402.03300, section 4.1.3).
    """
    given: list[tuple[int, int, float]] = []  # (sample, token, reward)
    for row, (item, reward) in enumerate(zip(tokens.trajectories, rewards.tolist(), strict=True)):
        steps = item.step_rewards or ((last_action(item), 0.0),)
        rest = reward - math.fsum(value for _, value in steps)
        given += [(row, place, value) for place, value in steps[:-1]]
        given.append((row, steps[-1][0], steps[-1][1] + rest))
    rows, places, values = zip(*given, strict=True)
    samples = torch.tensor(rows)  # [steps]
    shaped = shaping.shape_steps(estimator, torch.tensor(values), group_ids[samples], samples)
    clipped = shaped.clamp(*clip_range)
    indices = torch.from_numpy(tokens.bounds)[samples] + torch.tensor(places)  # [steps]
    placed = torch.zeros(len(tokens.action_mask)).index_put((indices,), clipped, accumulate=True)
    return masked(placed, tokens.action_mask)


def last_action(item: Trajectory) -> int:
    """Return the position of the last action token, or of the last token if there is no action token."""
    actions = np.flatnonzero(item.action_mask)
    return int(actions[-1]) if len(actions) else len(item.action_mask) - 1


def rollout_metrics(
    tokens: RolloutTokens, last_samples: NDArray[np.int64], rewards: Tensor, group_ids: Tensor, token_rewards: Tensor
) -> dict[str, float]:
    """Return the metrics of a rollout to log, including the mean of each entry of the agents' `extra_logs`.

    Rewards, scores and logs are averaged over the last samples of the episodes, lengths over all samples.
    """
    trajectories, rewards = tokens.trajectories, rewards[last_samples]
    episodes = [trajectories[number] for number in last_samples]
    groups = shaping.group_stats(rewards, group_ids[last_samples])
    several = groups.size > 1
    metrics = {
        "reward": float(rewards.mean()),
        "score": float(np.mean([item.score for item in episodes])),
        "return": float(token_rewards.sum()) / len(trajectories),
        "response_length": tokens.num_actions / len(trajectories),
        "total_length": float(tokens.lengths.mean()),
        "truncated": float(np.mean([item.truncated for item in trajectories])),
        "rollout/reward_std": float(rewards.double().std(correction=0)),
        "rollout/reward_max": float(rewards.max()),
    }
    if bool(several.any()):
        metrics["group_reward_std"] = float(groups.std[several].mean())
        equal = (groups.low == groups.high)[several].double()  # [samples in groups of several]
        sizes = groups.size[several].double()
        metrics["rollout/equal_groups"] = float((equal / sizes).sum() / (1 / sizes).sum())  # each group counts once
    names = sorted({name for item in episodes for name in item.extra_logs})
    return metrics | {
        name: float(np.mean([item.extra_logs[name] for item in episodes if name in item.extra_logs])) for name in names
    }
