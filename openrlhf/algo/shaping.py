"""Reward shaping: penalties, comparison within a group (the samples of one prompt), and assignment to tokens.

`SHAPING` maps --advantage_estimator to a function that compares rewards within a group; `advantages` then computes
advantages from the shaped rewards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from openrlhf.algo.reduce import masked

Shaping = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each sample's group; every field is [samples]."""

    mean: Tensor
    std: Tensor  # unbiased; 0 for a group of one
    low: Tensor
    high: Tensor
    size: Tensor


def group_stats(rewards: Tensor, group_ids: Tensor) -> GroupStats:
    """Compute the statistics of each sample's group, for groups of any size in any order.

    Sums are in float64, so that the mean of equal fp32 rewards is exactly that reward.
    """
    _, group = torch.unique(group_ids, return_inverse=True)  # [samples]: groups renumbered from 0
    exact = rewards.double()
    zeros = torch.zeros_like(exact)  # [samples], at least one entry per group
    size = zeros.index_add(0, group, torch.ones_like(exact))[group]
    mean = zeros.index_add(0, group, exact)[group] / size
    squares = zeros.index_add(0, group, (exact - mean).square())[group]
    return GroupStats(
        mean=mean.float(),
        std=(squares / (size - 1).clamp(min=1)).sqrt().float(),
        low=zeros.scatter_reduce(0, group, exact, "amin", include_self=False)[group].float(),
        high=zeros.scatter_reduce(0, group, exact, "amax", include_self=False)[group].float(),
        size=size.float(),
    )


def identity(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """PPO and REINFORCE++: the reward, unchanged except for conversion to fp32."""
    return rewards.float()


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO: the reward minus the mean of the other rewards in its group (arXiv 2402.14740); 0 for a group of one."""
    group = group_stats(rewards, group_ids)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1); the latter has less cancellation.
    return (rewards.float() - group.mean) * group.size / (group.size - 1).clamp(min=1)


def group_centred(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262) and Dr. GRPO (arXiv 2503.20783): the reward minus its group's mean."""
    return rewards.float() - group_stats(rewards, group_ids).mean


def group_norm(rewards: Tensor, group_ids: Tensor, eps: float = 1e-9) -> Tensor:
    """GRPO: (reward - group mean) / group standard deviation (arXiv 2402.03300, section 4.1.2).

    A group whose rewards are all equal has no signal and gets exact zeros; otherwise rounding errors could make the
    ratio of two tiny numbers large.
    """
    group = group_stats(rewards, group_ids)
    centred = (rewards.float() - group.mean) / (group.std + eps)
    return torch.where(group.low == group.high, 0.0, centred)


SHAPING: dict[str, Shaping] = {
    "gae": identity,
    "reinforce": identity,
    "rloo": leave_one_out,
    "reinforce_baseline": group_centred,
    "group_norm": group_norm,
    "dr_grpo": group_centred,
}


def shape_steps(estimator: str, rewards: Tensor, group_ids: Tensor, sample_ids: Tensor) -> Tensor:
    """Shape step rewards by comparing each with the other steps of its group; all tensors are [steps].

    For GRPO, this is process supervision (arXiv 2402.03300, section 4.1.3). RLOO's baseline is the mean over the steps
    of the other samples, because the steps of one sample are not independent; the result is 0 for a single sample.
    """
    if estimator != "rloo":
        return SHAPING[estimator](rewards, group_ids)
    group, own = group_stats(rewards, group_ids), group_stats(rewards, sample_ids)
    others = group.size - own.size
    baseline = (group.mean * group.size - own.mean * own.size) / others.clamp(min=1)
    return torch.where(others > 0, rewards.float() - baseline, 0.0)


# Estimators whose advantages are normalised over the rollout.
WHITENED = frozenset({"gae", "reinforce", "reinforce_baseline"})


def response_lengths(action_mask: Tensor) -> Tensor:
    """Count the tokens from the first to the last action token, inclusive, [batch]; 0 if there are none."""
    acts = action_mask.bool()
    begun = acts.cumsum(-1) > 0
    unfinished = acts.flip(-1).cumsum(-1).flip(-1) > 0
    return (begun & unfinished).sum(-1)


def overlong_penalty(rewards: Tensor, lengths: Tensor, max_len: int, buffer: float, factor: float) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): grows to `factor` over the last `buffer` tokens."""
    if not 0 < buffer <= max_len:
        raise ValueError(
            f"invalid overlong buffer: expected more than 0 and at most {max_len}, the longest response, got {buffer}"
        )
    excess = (lengths.float() - (max_len - buffer)).clamp(min=0.0, max=buffer)
    return rewards.float() - excess / buffer * factor


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """ProRL (arXiv 2505.24864): scale the reward of a truncated response by `coef`; a negative `coef` replaces it.

    The reward is never increased: scaling a negative reward towards zero would reward truncation.
    """
    if coef > 1:
        raise ValueError(f"the stop-properly coefficient must be at most 1, got {coef}")
    before = rewards.float()
    penalised = before * coef if coef >= 0 else torch.full_like(before, coef)
    return torch.where(truncated.bool(), torch.minimum(before, penalised), before)


@torch.no_grad()
def spread(rewards: Tensor, last: Tensor, kl: Tensor | None, action_mask: Tensor, kl_coef: float) -> Tensor:
    """Return token rewards [tokens]: -kl_coef kl at each action token, plus a sample's reward at its last one.

    `rewards` and `last`, the place of each sample's last action token or -1, are [samples]. See InstructGPT,
    arXiv 2203.02155, eq. 2. There is no KL term if `kl` is None or the coefficient is not positive.
    """
    penalised = kl is not None and kl_coef > 0
    token_rewards = masked(kl, action_mask) * -kl_coef if penalised else torch.zeros(action_mask.shape)
    acted = last >= 0
    token_rewards[last[acted]] += rewards[acted].float()
    return token_rewards


def group_is_kept(scores: Sequence[float], low: float, high: float) -> bool:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): return True if low < mean score of the group < high.

    A group with a missing score (NaN) is kept. The mean is rounded to fp32, so that equal scores on a bound are out.
    """
    if low >= high:
        raise ValueError(f"the filter range must have low < high, got {low} and {high}")
    mean = np.float32(fmean(scores))
    return not (mean <= low or mean >= high)
