"""Advantages and returns from token rewards, and normalisation of advantages over a whole rollout.

The estimators share one signature and are registered in `ADVANTAGES` by the value of --advantage_estimator. The
critic-free estimators share one function; they differ only in how `shaping` transforms the rewards and in whether
advantages are whitened.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algo.reduce import Moments, masked, moments

Advantages = Callable[[Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]]


@torch.no_grad()
def gae(
    token_rewards: Tensor, values: Tensor | None, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): advantages and returns, each [batch, tokens].

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lambd A_next, where "next" is the next action token.
    Environment tokens between turns are skipped: they add no discount and no value. V after the last action token is 0.
    """
    assert values is not None, "gae needs the values of a critic"
    acts = _time_first(action_mask.bool())  # [tokens, batch], like all tensors below
    value = masked(_time_first(values), acts)
    value_from_here = decayed_sums(value, acts, 0.0)  # value of this or the next action token
    deltas = _time_first(token_rewards).float() - value
    deltas[:-1].add_(value_from_here[1:], alpha=gamma)
    advantages = masked(decayed_sums(masked(deltas, acts), acts, gamma * lambd), acts)
    return _time_first(advantages), _time_first(advantages + value)  # back to [batch, tokens]


@torch.no_grad()
def discounted_returns(token_rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next over action tokens, [batch, tokens] (REINFORCE, Williams 1992)."""
    steps = masked(token_rewards, action_mask)
    if gamma == 1.0:
        return masked(steps.flip(-1).cumsum(-1).flip(-1), action_mask)
    acts = _time_first(action_mask.bool())
    return _time_first(masked(decayed_sums(_time_first(steps), acts, gamma), acts))


def critic_free(
    token_rewards: Tensor, values: Tensor | None, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Use the return of the shaped rewards as the advantage; `values` and `lambd` are ignored."""
    returns = discounted_returns(token_rewards, action_mask, gamma)
    return returns.clone(), returns


def decayed_sums(steps: Tensor, acts: Tensor, decay: float) -> Tensor:
    """Compute S_t = x_t + decay S_{t+1} at action tokens and S_t = S_{t+1} elsewhere, from the last token to the first.

    `steps` and `acts` are [tokens, batch], and `steps` must be zero at non-action tokens. Time is the first dimension,
    so that each step is one fused operation on contiguous memory. With a decay of 0, the result at each token is the
    input at this or the next action token.
    """
    sums = steps.clone()
    columns, decays = sums.unbind(0), torch.where(acts, decay, 1.0).to(sums.dtype).unbind(0)
    for t in range(len(columns) - 2, -1, -1):
        columns[t].addcmul_(decays[t], columns[t + 1])
    return sums


def _time_first(tensor: Tensor) -> Tensor:
    """Transpose [batch, tokens] to [tokens, batch], or back."""
    return tensor.T.contiguous()


@torch.no_grad()
def normalize(
    advantages: Tensor, action_mask: Tensor, divide_by_std: bool = True, statistics: Moments | None = None
) -> Tensor:
    """Whiten advantages by the statistics of a whole rollout (REINFORCE++, arXiv 2501.03262); zero at masked tokens.

    Without `statistics`, they are computed from `advantages`, which must then be the whole rollout.
    """
    whole = statistics or moments(advantages, action_mask)
    scale = whole.variance.clamp(min=1e-8).rsqrt() if divide_by_std else torch.ones_like(whole.count)
    return masked((masked(advantages, action_mask) - whole.value.float()) * scale.float(), action_mask)


ADVANTAGES: dict[str, Advantages] = {
    "gae": gae,
    "reinforce": critic_free,
    "rloo": critic_free,
    "reinforce_baseline": critic_free,
    "group_norm": critic_free,
    "dr_grpo": critic_free,
}
