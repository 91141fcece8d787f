"""The critic's loss: the clipped squared error of its values."""

import torch
from torch import Tensor

from openrlhf.algo.reduce import Denominator, Metrics, aggregate, masked, mean_of


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    denominator: Denominator,
    value_clip: float | None = 0.5,
) -> tuple[Tensor, Metrics]:
    """Half the squared error of the value, or of the value clipped around the old value if that is larger.

    This follows PPO's reference implementation (arXiv 2005.12729, section 3). `denominator` is the number of action
    tokens in the whole optimizer step.
    """
    value, target = masked(values, action_mask), masked(returns, action_mask)
    errors = (value - target).square()
    metrics = {"values": mean_of(value, action_mask)}
    if value_clip is not None:
        old = masked(old_values, action_mask)
        # Not old + clamp(value - old), whose rounding would make unclipped values count as clipped.
        bounded = (value.clamp(old - value_clip, old + value_clip) - target).square()
        metrics["value_clip_ratio"] = mean_of(bounded > errors, action_mask)
        errors = torch.maximum(errors, bounded)
    return aggregate(0.5 * errors, action_mask, "token-mean", denominator), metrics
