"""Load balancing of a mixture of experts (Switch Transformer, arXiv 2101.03961, eq. 4, with k experts per token).

The loss of a set of tokens is

    experts x sum over experts of (share of the tokens that the expert gets) x (its mean probability)

It is k if all experts get the same number of tokens. The shares have no gradient. If they are those of a whole
optimizer step, the loss is a sum over tokens, so micro-batches can contribute to it one by one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def router_loads(logits: Sequence[Tensor], k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tokens that each expert gets and the sum of its probabilities over tokens, [experts] each.

    Both are means over layers; `logits` are [tokens, experts] for each layer, and `mask` [tokens] excludes padding.
    """
    counts: list[Tensor] = []  # [experts] of each layer
    probabilities: list[Tensor] = []
    for layer in logits:
        found = layer.float().softmax(-1)  # [tokens, experts]
        chosen = torch.zeros_like(found).scatter_(1, found.detach().topk(k).indices, 1.0)
        if mask is not None:
            kept = mask.flatten().to(found)[:, None]
            found, chosen = found * kept, chosen * kept
        counts.append(chosen.sum(0))
        probabilities.append(found.sum(0))
    return torch.stack(counts).mean(0), torch.stack(probabilities).mean(0)


def balance_loss(probabilities: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
    """Return a micro-batch's share of the loss of a step.

    `probabilities` are those of the micro-batch, `counts` and `tokens` those of the step; see `router_loads`.
    """
    return len(counts) * (counts / tokens * (probabilities / tokens)).sum()
