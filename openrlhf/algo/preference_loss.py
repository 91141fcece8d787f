"""Losses on preferences: pairwise reward models, DPO, cDPO, IPO and KTO.

Inputs are one number per response: a reward, or a log-ratio of policy to reference (`chosen_nll` takes tokens).
Denominators count the pairs or samples of the whole optimizer step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.algo.reduce import Denominator, Mean, Metrics, aggregate, divide, mean_of

PairwiseLoss = Callable[[Tensor, Tensor, Denominator, Tensor | None], tuple[Tensor, Metrics]]


def pairwise_sigmoid(
    chosen: Tensor, rejected: Tensor, denominator: Denominator, margin: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """-log sigmoid(r_c - r_r - margin) over pairs (arXiv 2203.02155, eq. 1; margin: arXiv 2307.09288)."""
    difference = chosen.float() - rejected.float()
    if margin is not None:
        difference = difference - margin.float()
    return divide(-F.logsigmoid(difference).sum(), denominator), _pair_metrics(chosen, rejected)


def pairwise_logexp(
    chosen: Tensor, rejected: Tensor, denominator: Denominator, margin: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """log(1 + exp(r_r - r_c)) over pairs (arXiv 2204.05862)."""
    if margin is not None:
        raise ValueError("the log-exp loss does not support a margin; use the sigmoid loss")
    losses = F.softplus(rejected.float() - chosen.float())
    return divide(losses.sum(), denominator), _pair_metrics(chosen, rejected)


REWARD_LOSSES: dict[str, PairwiseLoss] = {"sigmoid": pairwise_sigmoid, "logexp": pairwise_logexp}


def dpo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    beta: float,
    denominator: Denominator,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """DPO (arXiv 2305.18290, eq. 7); cDPO (Mitchell 2023) if `label_smoothing`, the share of wrong labels, is set.

    A log-ratio is log pi - log ref summed over a response (`reduce.sequence_sums`), [pairs].
    """
    chosen, rejected = chosen_log_ratios.float(), rejected_log_ratios.float()
    logits = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return divide(losses.sum(), denominator), _pair_metrics(beta * chosen, beta * rejected)


def ipo(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, beta: float, denominator: Denominator
) -> tuple[Tensor, Metrics]:
    """IPO (arXiv 2310.12036, eq. 17): regress the log-ratio difference to 1 / (2 beta).

    The paper uses summed log-probs; the caller may pass length averages (`reduce.sequence_means`) instead.
    """
    chosen, rejected = chosen_log_ratios.float(), rejected_log_ratios.float()
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return divide(losses.sum(), denominator), _pair_metrics(beta * chosen, beta * rejected)


def chosen_nll(
    log_probs: Tensor, mask: Tensor, denominator: Denominator, rows: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Mean over pairs of the chosen response's mean negative log-prob (iterative RPO, arXiv 2404.19733, eq. 1)."""
    loss = -aggregate(log_probs, mask, "seq-mean", denominator, rows)
    return loss, {"nll": mean_of(-log_probs, mask)}


def kto_baseline(mismatch: Mean) -> Tensor:
    """KTO's z0: the mean log-ratio of all mismatched pairs of the step, at least zero (arXiv 2402.01306, eq. 8).

    A mismatched pair is a prompt with the response to another prompt. The mean is computed before the step over all
    micro-batches, so it does not depend on how the batch is split. It is detached.
    """
    return mismatch.value.clamp(min=0.0).float()


def kto(
    log_ratios: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float,
    denominator: Denominator,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """KTO (arXiv 2402.01306, eq. 8): push log-ratios of good responses above `baseline`, those of bad ones below it.

    `log_ratios` [samples] are summed over each response, and `desirable` [samples] is true for good responses. The
    denominator counts samples.
    """
    good, ratios = desirable.bool(), log_ratios.float()
    gain = beta * (ratios - baseline.detach())
    # sigmoid(-x) is more precise than 1 - sigmoid(x) for large x.
    losses = torch.where(good, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))
    metrics = {"chosen_reward": mean_of(beta * ratios, good), "reject_reward": mean_of(beta * ratios, ~good)}
    return divide(losses.sum(), denominator), metrics


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    return {"acc": mean_of(chosen > rejected), "chosen_reward": mean_of(chosen), "reject_reward": mean_of(rejected)}
