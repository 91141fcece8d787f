"""KL divergence from the reference policy: estimators, reward penalty, loss term, and coefficient controllers.

The KL enters training either as a penalty on token rewards (`kl_penalty`) or as a loss term (`kl_loss`, with
--use_kl_loss).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.algo.reduce import Denominator, Metrics, aggregate, masked_log_probs, mean_of

LIMIT = 10.0  # bound on a token's KL in the reward, and on the log-ratio in the loss
MAX_WEIGHT = 10.0  # bound on the importance weight in the unbiased gradient


def k1(log_ratio: Tensor) -> Tensor:
    """log pi - log ref: unbiased, but high variance (Schulman, "Approximating KL Divergence", 2020)."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: low variance, small bias, and the exact KL gradient on policy (Schulman 2020)."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-r) - 1 + r with r = log pi - log ref: unbiased and never negative (Schulman 2020; GRPO eq. 4)."""
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@torch.no_grad()
def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor, estimator: str = "k1") -> Tensor:
    """Return the KL per token as a reward term: clamped to [-10, 10], zero at masked tokens, without gradient."""
    log_ratio = masked_log_probs(log_probs, action_mask) - masked_log_probs(ref_log_probs, action_mask)
    return KL_ESTIMATORS[estimator](log_ratio.clamp(-LIMIT, LIMIT)).clamp(-LIMIT, LIMIT)


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    action_mask: Tensor,
    denominator: Denominator,
    estimator: str = "k3",
    mode: str = "token-mean",
    rows: Tensor | None = None,
    old_log_probs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the KL as a loss term, before multiplication by its coefficient.

    The log-ratio is clamped with a straight-through gradient, so that a token beyond the limit keeps the gradient of
    the limit instead of losing it.

    With `old_log_probs`, the value is the same, but the gradient is that of w k1^2 / 2 with a detached
    w = min(pi / pi_old, 10), which is unbiased for the reverse KL off policy (arXiv 2510.01555; DeepSeek-V3.2).
    """
    current, reference = masked_log_probs(log_probs, action_mask), masked_log_probs(ref_log_probs, action_mask)
    log_ratio = current - reference
    log_ratio = log_ratio.detach().clamp(-LIMIT, LIMIT) + (log_ratio - log_ratio.detach())  # straight-through
    values = KL_ESTIMATORS[estimator](log_ratio)
    if old_log_probs is not None:
        log_weight = (current - masked_log_probs(old_log_probs, action_mask)).detach()
        pull = current * (log_weight.clamp(max=20.0).exp().clamp(max=MAX_WEIGHT) * log_ratio.detach())
        values = values.detach() + (pull - pull.detach())
    return aggregate(values, action_mask, mode, denominator, rows), {"kl_loss": mean_of(values, action_mask)}


@dataclass(frozen=True)
class FixedKL:
    """A constant KL coefficient."""

    coef: float

    def updated(self, kl: float, num_samples: int) -> "FixedKL":
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient adjusted to keep the KL near `target` (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"KL target and horizon must be positive, got {self.target} and {self.horizon}")

    def updated(self, kl: float, num_samples: int) -> "AdaptiveKL":
        """Return the controller after a rollout of `num_samples` samples with mean KL `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        factor = max(1 + error * num_samples / self.horizon, 0.2)  # five horizons could make it zero
        return replace(self, coef=self.coef * factor)


def kl_controller(coef: float, target: float | None, horizon: float) -> FixedKL | AdaptiveKL:
    """Return an adaptive controller if a target is given, else a fixed one; save its state with `asdict`."""
    return FixedKL(coef) if target is None else AdaptiveKL(coef, target, horizon)
