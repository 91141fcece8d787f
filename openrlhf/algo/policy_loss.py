"""The policy loss: clipped surrogate per token (PPO) or per sequence (GSPO), rollout correction, entropy bonus.

Per-token tensors all have the shape of the mask: [batch, tokens], or packed, in which case `rows` gives each token's
sequence number. The loss knows nothing about the cluster: the caller passes the step's global denominator. Its options
are the section of flags `PolicyLossFlags`.
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
from openrlhf.config.sections.rl import PolicyLossFlags

PPO = PolicyLossFlags()  # the default options: clip at 0.2, mean over tokens, no correction
MAX_LOG_RATIO = 20.0  # keeps exp finite; a ratio of 5e8 is as good as infinite


Ratio = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # log-ratios, mask of action tokens, `rows`
Correction = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]  # the same for log-weights, and bounds


def token_ratio(log_ratio: Tensor, mask: Tensor, rows: Tensor | None) -> Tensor:
    """PPO: each token's own ratio pi / pi_old (arXiv 1707.06347)."""
    return _exp(log_ratio)


def sequence_ratio(log_ratio: Tensor, mask: Tensor, rows: Tensor | None) -> Tensor:
    """GSPO: the geometric mean of a sequence's token ratios, at each of its tokens (arXiv 2507.18071, eq. 7)."""
    return _exp(to_tokens(sequence_means(log_ratio, mask, rows), mask, rows))


def truncate(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """TIS: the importance weight, clamped to [low, high] (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025)."""
    return _exp(log_weight).clamp(low, high)


def icepop(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """IcePop: drop tokens whose weight is outside [low, high]; the others keep theirs (arXiv 2510.18855)."""
    weight = _exp(log_weight)
    return torch.where((low <= weight) & (weight <= high), weight, 0.0)


def sequence_mask(log_weight: Tensor, mask: Tensor, rows: Tensor | None, low: float, high: float) -> Tensor:
    """Masked importance sampling by sequence: the geometric mean of a sequence's weights must be in [low, high]
    (Liu et al., "When Speed Kills Stability", 2025).

    The kept weights are clamped to the interval too: token log-weights of +100 and -100 average to 0, so the sequence
    passes, and one of its tokens would have a weight of e^100.
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
    """Clipped surrogate (arXiv 1707.06347, eq. 7) with an asymmetric range (DAPO, arXiv 2503.14476, eq. 10).

    `denominator` counts tokens or sequences, as `settings.aggregation` says. A single on-policy step may pass the
    current log-probs as the old ones: only the first argument carries gradient. `rollout_log_probs` are the engine's,
    used to correct for the difference between engine and trainer: for PPO by a weight on each token; for GSPO they
    replace `old_log_probs` in the ratio, and there is no weight.
    """
    corrects = bool(settings.enable_vllm_is_correction)
    if corrects and rollout_log_probs is None:
        raise ValueError(f"correction {settings.vllm_is_correction_type!r} needs the rollout's log-probs")
    mask = action_mask.bool()
    current, old = masked_log_probs(log_probs, mask), masked_log_probs(old_log_probs.detach(), mask)
    advantage = masked(advantages, mask)
    metrics = {"ppo_kl": mean_of(old - current, mask)}

    behaviour, weight = old, None
    if rollout_log_probs is not None:
        rollout = masked_log_probs(rollout_log_probs.detach(), mask)
        metrics["vllm_kl"] = mean_of(rollout - old, mask)
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
    """Return per-token losses, and a mask of the tokens at which clipping was active.

    Dual clip (arXiv 1912.09729, eq. 5) bounds the loss of an action with negative advantage by c|A|, however large its
    ratio is.
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
    """Negative mean entropy; added with its coefficient, it is the entropy bonus (A3C, arXiv 1602.01783)."""
    return -aggregate(entropy, action_mask, mode, denominator, rows), {"entropy": mean_of(entropy, action_mask)}


def _exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), bounded so that it stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
