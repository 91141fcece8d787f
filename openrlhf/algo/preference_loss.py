"""Losses on preferences: reward models, DPO and its kin, KTO. Each denominator counts the whole optimizer step."""

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
        raise ValueError("a margin belongs to the sigmoid loss; the log-exp loss has none")
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
    """DPO (arXiv 2305.18290, eq. 7); with `label_smoothing` the probability of a flipped label, cDPO (Mitchell 2023).

    A log-ratio is log pi - log ref summed over a response (`reduce.sequence_sums`), [pairs].
    """
    chosen, rejected = chosen_log_ratios.float(), rejected_log_ratios.float()
    logits = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return divide(losses.sum(), denominator), _pair_metrics(beta * chosen, beta * rejected)


def ipo(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, beta: float, denominator: Denominator
) -> tuple[Tensor, Metrics]:
    """IPO (arXiv 2310.12036, eq. 17): the log-ratio difference is drawn to 1 / (2 beta).

    Over summed log-probs as in the paper; the caller may give length averages (`reduce.sequence_means`) instead.
    """
    chosen, rejected = chosen_log_ratios.float(), rejected_log_ratios.float()
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return divide(losses.sum(), denominator), _pair_metrics(beta * chosen, beta * rejected)


def chosen_nll(
    log_probs: Tensor, mask: Tensor, denominator: Denominator, rows: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Mean negative log-prob of each chosen response, over pairs (iterative RPO, arXiv 2404.19733, eq. 1)."""
    loss = -aggregate(log_probs, mask, "seq-mean", denominator, rows)
    return loss, {"nll": mean_of(-log_probs, mask)}


def mismatch_kl(log_ratios: Tensor) -> Mean:
    """Log-ratios of mismatched pairs (a prompt with another prompt's response), to be added over the optimizer step."""
    return mean_of(log_ratios)


def kto_baseline(mismatch: Mean) -> Tensor:
    """KTO's z0: the mean over ALL mismatched pairs of the step, not below zero, detached (arXiv 2402.01306, eq. 8).

    Taken beforehand and over the whole step, it does not depend on how the step is cut into micro-batches.
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
    """KTO (arXiv 2402.01306, eq. 8): good responses should beat `baseline` (see `kto_baseline`), bad ones fall below.

    `log_ratios` are summed over each response, `desirable` is true for good ones, both [samples]; the denominator
    counts samples.
    """
    good, ratios = desirable.bool(), log_ratios.float()
    gain = beta * (ratios - baseline.detach())
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits for large x
    losses = torch.where(good, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))
    metrics = {"chosen_reward": mean_of(beta * ratios, good), "reject_reward": mean_of(beta * ratios, ~good)}
    return divide(losses.sum(), denominator), metrics


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    return {
        "acc": mean_of(chosen > rejected),
        "chosen_reward": mean_of(chosen),
        "reject_reward": mean_of(rejected),
    }
