"""The policy loss: clipped surrogate per token (PPO) or per sequence (GSPO), rollout correction, entropy bonus.

Per-token tensors have the shape of the mask: [batch, tokens], or packed with `rows` as each token's sequence number.
The loss is independent of the cluster, because the caller passes the denominator of the whole step. `PolicyLossFlags`
holds its options.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algo.reduce import (
    Denominator,
    Metrics,
    aggregate,
    masked,
    masked_log_probs,
    mean_of,
    sequence_means,
    to_tokens,
)
from openrlhf.config.sections.algorithm import PolicyLossFlags

PPO = PolicyLossFlags()  # the defaults: clip at 0.2, mean over tokens, no correction
MAX_LOG_RATIO = 20.0  # keeps exp finite; far beyond any meaningful ratio


Ratio = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (log-ratios, mask of action tokens, rows)
Correction = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]  # (log-weights, mask, rows, low, high)


def token_ratio(log_ratio: Tensor, mask: Tensor, rows: Tensor | None) -> Tensor:
    """PPO: the ratio pi / pi_old of each token (arXiv 1707.06347)."""
    return _exp(log_ratio)


def sequence_ratio(log_ratio: Tensor, mask: Tensor, rows: Tensor | None) -> Tensor:
    """GSPO: the geometric mean of a sequence's token ratios, for each of its tokens (arXiv 2507.18071, eq. 7)."""
    return _exp(to_tokens(sequence_means(log_ratio, mask, rows), mask, rows))


def truncate(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """TIS: the importance weight, clamped to [low, high] (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025)."""
    return _exp(log_weight).clamp(low, high)


def icepop(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """IcePop: drop tokens whose importance weight is outside [low, high] (arXiv 2510.18855)."""
    weight = _exp(log_weight)
    return torch.where((low <= weight) & (weight <= high), weight, 0.0)


def sequence_mask(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """Drop sequences whose geometric mean of importance weights is outside [low, high] (Liu et al., "When Speed Kills
    Stability", 2025).

    The weights of kept sequences are also clamped to the interval: token log-weights of +100 and -100 average to 0, so
    the sequence is kept although one of its tokens has a weight of e^100.
    """
    mean = sequence_ratio(log_weight, mask, rows)
    return torch.where((low <= mean) & (mean <= high), _exp(log_weight).clamp(low, high), 0.0)


POLICY_LOSSES: dict[str, Ratio] = {"ppo": token_ratio, "gspo": sequence_ratio}
CORRECTIONS: dict[str, Correction] = {"tis": truncate, "icepop": icepop, "seq-mask-tis": sequence_mask}


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    denominator: Denominator,
    settings: PolicyLossFlags = PPO,
    rollout_log_probs: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped loss (arXiv 1707.06347, eq. 7) with an asymmetric range (DAPO, arXiv 2503.14476, eq. 10).

    `denominator` counts tokens or sequences, depending on `settings.aggregation`. In a single on-policy step, the
    current log-probs can also be passed as the old ones; only the first argument has a gradient. `rollout_log_probs`
    are the engine's log-probs, used to correct for the difference between engine and trainer: PPO multiplies the loss
    of each token by a weight; GSPO uses them instead of `old_log_probs` in the ratio.
    """
    corrects = bool(settings.enable_vllm_is_correction)
    if corrects and rollout_log_probs is None:
        raise ValueError(f"correction {settings.vllm_is_correction_type!r} needs rollout_log_probs")
    mask = action_mask.bool()
    current, old = masked_log_probs(log_probs, mask), masked_log_probs(old_log_probs.detach(), mask)
    advantage = masked(advantages, mask)
    metrics = {"ppo_kl": mean_of(old - current, mask)}

    behaviour, weight = old, None
    if rollout_log_probs is not None:
        rollout = masked_log_probs(rollout_log_probs.detach(), mask)
        metrics["engine_kl"] = mean_of(rollout - old, mask)
        if corrects and settings.policy_loss_type == "gspo":
            behaviour = rollout
        elif corrects:
            correct = CORRECTIONS[settings.vllm_is_correction_type]
            weight = correct(old - rollout, mask, rows, *settings.correction_range)
            metrics["is_filter_ratio"] = mean_of(weight == 0, mask)

    ratio = POLICY_LOSSES[settings.policy_loss_type](current - behaviour, mask, rows)
    losses, clipped = clipped_surrogate(ratio, advantage, settings.clip_range, settings.dual_clip)
    metrics["clip_ratio"] = mean_of(clipped, mask)
    if weight is not None:
        losses = losses * weight
    return aggregate(losses, mask, settings.aggregation, denominator, rows), metrics


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and a mask of the clipped tokens.

    Dual clip (arXiv 1912.09729, eq. 5) bounds the loss of an action with a negative advantage by c|A|, however large
    its ratio is.
    """
    plain = ratio * advantages
    below, above = clip_range
    bounded = ratio.clamp(1 - below, 1 + above) * advantages
    objective = torch.minimum(plain, bounded)
    if dual_clip is not None:
        floor = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, floor, objective)
    return -objective, (bounded < plain).detach()


def entropy_loss(
    entropy: Tensor, action_mask: Tensor, denominator: Denominator, mode: str = "token-mean", rows: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Return the negative mean entropy, to be multiplied by the weight of the bonus (A3C, arXiv 1602.01783)."""
    return -aggregate(entropy, action_mask, mode, denominator, rows), {"entropy": mean_of(entropy, action_mask)}


def _exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped so that it stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
