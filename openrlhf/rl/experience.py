"""From trajectories to advantages, in the order of the formulas: rewards, penalties, shaping, KL, advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openrlhf.algo import shaping
from openrlhf.algo.advantages import ADVANTAGES, normalize
from openrlhf.algo.kl import kl_penalty
from openrlhf.rl.samples import Batching, Sample, batch_trajectories, temperature_factors
from openrlhf.rl.workers import Workers
from openrlhf.types import TEMPERATURE_FACTORS, Batch, Trajectory


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
    scores_policy: bool  # the policy's own log-probs, under the weights at hand
    old_from_engine: bool = False  # the ratio is taken to the log-probs that a sample was drawn with


@dataclass(frozen=True)
class Experience:
    """Samples ready to be trained on, and what to log about them."""

    samples: list[Sample]
    metrics: dict[str, float]
    kl: float | None  # mean over action tokens, for the controller


async def make_experience(
    trajectories: Sequence[Trajectory],
    workers: Workers,
    batching: Batching,
    settings: ExperienceSettings,
    kl_coef: float,
) -> Experience:
    """Scores a rollout and turns its rewards into advantages."""
    trajectories = await with_model_rewards(trajectories, workers)
    scored = await score(trajectories, workers, batching, log_probs=settings.scores_policy)
    mask = pad_sequence([torch.tensor(item.action_mask) for item in trajectories], batch_first=True)
    mask[:, 0] = False  # nothing predicts a first token
    rewards = penalised(trajectories, mask, settings)
    shaped = shape(rewards, trajectories, settings)
    kl = _kl(scored, mask, settings)
    token_rewards = shaping.spread(shaped, kl if settings.kl_in_reward else None, mask, kl_coef)
    if settings.step_rewards:
        token_rewards = _with_step_rewards(token_rewards, trajectories)
    values = scored.get("values", torch.zeros_like(token_rewards))
    estimate = ADVANTAGES[settings.estimator]
    advantages, returns = estimate(token_rewards, values, mask, settings.gamma, settings.lambd)
    if settings.estimator in shaping.WHITENED:
        advantages = normalize(advantages, mask, settings.divide_by_std)
    arrays = scored | {"advantages": advantages}
    if settings.old_from_engine:
        arrays["old_log_probs"] = scored["rollout_log_probs"]
    if "values" in scored:
        arrays = {name: value for name, value in arrays.items() if name != "values"}
        arrays |= {"old_values": values, "returns": returns}
    factors = temperature_factors(trajectories)
    if factors is not None:
        arrays[TEMPERATURE_FACTORS] = pad_sequence([torch.from_numpy(item) for item in factors], batch_first=True)
    mean_kl = None if kl is None else float(kl[mask].mean())
    metrics = rollout_metrics(trajectories, rewards, token_rewards, mask)
    if mean_kl is not None:
        metrics["kl"] = mean_kl
    return Experience(_samples(trajectories, arrays), metrics, mean_kl)


async def with_model_rewards(trajectories: Sequence[Trajectory], workers: Workers) -> list[Trajectory]:
    """Rewards of the reward models, for samples that have none yet; a score that is there stays."""
    missing = [item for item in trajectories if math.isnan(item.reward)]
    given = await workers.rewards(missing) if missing else None
    if given is None:
        return list(trajectories)
    values = iter(given.tolist())

    def rewarded(item: Trajectory) -> Trajectory:
        if not math.isnan(item.reward):
            return item
        value = next(values)
        return replace(item, reward=value, score=value if math.isnan(item.score) else item.score)

    return [rewarded(item) for item in trajectories]


async def score(
    trajectories: Sequence[Trajectory], workers: Workers, batching: Batching, *, log_probs: bool
) -> dict[str, Tensor]:
    """What the models say, each [samples, tokens] in the order of the trajectories."""
    parts = batching.cut([len(item.input_ids) for item in trajectories])
    batches = [batch_trajectories([trajectories[place] for place in part], batching.layout) for part in parts]
    scores = await workers.score(batches, log_probs=log_probs)
    longest = max(len(item.input_ids) for item in trajectories)
    names = {
        "old_log_probs": scores.log_probs,
        "reference_log_probs": scores.reference_log_probs,
        "values": scores.values,
    }
    found = {name: _unbatch(batches, tensors, parts, longest) for name, tensors in names.items() if tensors is not None}
    found["rollout_log_probs"] = pad_sequence(
        [torch.tensor(item.rollout_log_probs) for item in trajectories], batch_first=True
    )
    return found


def penalised(trajectories: Sequence[Trajectory], mask: Tensor, settings: ExperienceSettings) -> Tensor:
    """Rewards after the length penalties, [samples]."""
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if settings.overlong is not None:
        rewards = shaping.overlong_penalty(rewards, shaping.response_lengths(mask), *settings.overlong)
    if settings.stop_properly is not None:
        truncated = torch.tensor([item.truncated for item in trajectories])
        rewards = shaping.stop_properly_penalty(rewards, truncated, settings.stop_properly)
    return rewards


def shape(rewards: Tensor, trajectories: Sequence[Trajectory], settings: ExperienceSettings) -> Tensor:
    """Rewards relative to their group, as the estimator has it, within the clip range."""
    group_ids = torch.tensor([item.prompt.index for item in trajectories])
    return shaping.clip_rewards(shaping.SHAPING[settings.estimator](rewards, group_ids), *settings.clip_range)


def _kl(scored: Mapping[str, Tensor], mask: Tensor, settings: ExperienceSettings) -> Tensor | None:
    """Per-token KL of the policy that trains, or where it was not asked of the one that sampled, to the reference."""
    if "reference_log_probs" not in scored:
        return None
    own = scored.get("old_log_probs", scored["rollout_log_probs"])
    return kl_penalty(own, scored["reference_log_probs"], mask, settings.kl_estimator)


def _with_step_rewards(token_rewards: Tensor, trajectories: Sequence[Trajectory]) -> Tensor:
    """An agent's step rewards where its turns end; the last turn's is already there as part of the sum."""
    for row, item in enumerate(trajectories):
        for place, reward in item.step_rewards[:-1]:
            token_rewards[row, place] += reward
            token_rewards[row, item.step_rewards[-1][0]] -= reward
    return token_rewards


def _unbatch(batches: Sequence[Batch], tensors: list[Tensor], parts: list[list[int]], longest: int) -> Tensor:
    """Micro-batches' [rows, tokens] back to [samples, tokens] in the samples' own order."""
    whole = torch.zeros(sum(map(len, parts)), longest)
    for batch, tensor, part in zip(batches, tensors, parts, strict=True):
        for number, place in enumerate(part):
            own = tensor.cpu()[batch.sequence_ids == number]
            whole[place, : len(own)] = own
    return whole


def _samples(trajectories: Sequence[Trajectory], arrays: Mapping[str, Tensor]) -> list[Sample]:
    made = []
    for row, item in enumerate(trajectories):
        own: dict[str, NDArray[np.float32]] = {
            name: tensor[row, : len(item.input_ids)].float().numpy() for name, tensor in arrays.items()
        }
        made.append(Sample(item, own))
    return made


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, token_rewards: Tensor, mask: Tensor
) -> dict[str, float]:
    """What §6 of the documents logs about a rollout."""
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
