"""Losses on tokens: supervised fine-tuning, distillation and process rewards.

Logits and log-probs at position t predict `labels[t]`; the caller has already shifted them. The same mask applies to
all terms of a loss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf.algo.reduce import Denominator, Metrics, aggregate, masked, mean_of


def sft_loss(log_probs: Tensor, loss_mask: Tensor, denominator: Denominator) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the target tokens; `denominator` is their count in the whole optimizer step."""
    loss = -aggregate(log_probs, loss_mask, "token-mean", denominator)
    return loss, {"gpt_loss": mean_of(-log_probs, loss_mask)}


def kd_terms(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(label) and the sum over the vocabulary of p_teacher x log p_student, both [...].

    Logits are [..., vocab]. A token with a student logit of -inf adds nothing to the sum.
    """
    log_probs = student_logits.float().log_softmax(-1)
    teacher = teacher_logits.detach().float().softmax(-1)
    cross = (teacher * torch.where(log_probs.isinf(), 0.0, log_probs)).sum(-1)  # [...]
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), cross


def kd_loss(
    log_probs: Tensor, cross: Tensor, loss_mask: Tensor, denominator: Denominator, kd_coef: float
) -> tuple[Tensor, Metrics]:
    """(1 - c) cross-entropy with the labels + c cross-entropy with the teacher (Hinton et al., arXiv 1503.02531).

    `kd_terms` computes both terms.
    """
    loss = -aggregate((1 - kd_coef) * log_probs + kd_coef * cross, loss_mask, "token-mean", denominator)
    return loss, {"gpt_loss": mean_of(-log_probs, loss_mask), "distil_loss": mean_of(-cross, loss_mask)}


def prm_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    denominator: Denominator,
    reward_token_ids: Sequence[int] | None = None,
) -> tuple[Tensor, Metrics]:
    """Cross-entropy at the ends of steps (Math-Shepherd, arXiv 2312.08935); `denominator` counts steps.

    Integer labels are token ids; the softmax is over the whole vocabulary, or only over `reward_token_ids` if given.
    Float labels are probabilities p of the first of two reward tokens: cross-entropy against [p, 1 - p].
    """
    kept = mask.bool()
    if reward_token_ids is not None:
        logits = logits[..., torch.tensor(reward_token_ids, device=logits.device)]  # [..., reward tokens]
    log_probs = masked(logits, kept.unsqueeze(-1)).log_softmax(-1)  # [..., vocab or reward tokens]
    if labels.is_floating_point():
        count = 0 if reward_token_ids is None else len(reward_token_ids)
        if count != 2:
            raise ValueError(f"float labels: expected exactly 2 reward tokens, the positive one first, got {count}")
        positive = masked(labels, kept)  # [...]
        targets = torch.stack([positive, 1 - positive], dim=-1)  # [..., 2]
        losses, best = -(targets * log_probs).sum(-1), targets.argmax(-1)
    else:
        # The column of each label, [...]; 0 at masked positions, which also need a valid index.
        best = torch.where(kept, labels, 0).long()
        if reward_token_ids is not None:
            matches = labels.unsqueeze(-1) == torch.tensor(reward_token_ids, device=labels.device)  # [..., tokens]
            unknown = kept & ~matches.any(-1)
            if bool(unknown.any()):
                ids = sorted(set(labels[unknown].tolist()))
                raise ValueError(f"labels {ids[:5]} are not reward tokens: expected {list(reward_token_ids)}")
            best = matches.int().argmax(-1)
        losses = -log_probs.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    metrics = {"prm_loss": mean_of(losses, kept), "acc": mean_of(log_probs.argmax(-1) == best, kept)}
    return aggregate(losses, kept, "token-mean", denominator), metrics
