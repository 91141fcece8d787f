"""Masked reductions from tokens to sequences to a loss, shared by all losses.

Losses are independent of the cluster: each divides its sum by the denominator of the whole optimizer step, which the
caller passes in, so that the losses of micro-batches and ranks add up to the loss of the step.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

Denominator = float | Tensor
AGGREGATIONS = ("token-mean", "seq-mean", "constant")
LOWEST_LOG_PROB = -1e4  # replaces -inf; far below the fp32 log-prob of any possible token


@dataclass(frozen=True)
class Mean:
    """A mean stored as sum and count, so that micro-batches, ranks and packs can be combined exactly."""

    total: Tensor  # [] float64
    count: Tensor  # [] float64

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(torch.add, vars(self).values(), vars(other).values()))

    def cpu(self) -> Self:
        return type(self)(*(tensor.cpu() for tensor in vars(self).values()))

    @property
    def value(self) -> Tensor:
        """The mean, or zero if the count is zero."""
        return divide(self.total, self.count)


@dataclass(frozen=True)
class Moments(Mean):
    """A mean that also tracks the variance of its summands."""

    squares: Tensor  # [] float64; in float32, the variance would suffer from cancellation

    @property
    def variance(self) -> Tensor:
        """Population variance."""
        return (divide(self.squares, self.count) - self.value.square()).clamp(min=0.0)


Metrics = dict[str, Mean]


@torch.no_grad()
def mean_of(values: Tensor, mask: Tensor | None = None) -> Mean:
    """Return the detached sum and count of the unmasked `values`."""
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    # Use float64, because a float32 counter saturates at 16M tokens.
    return Mean(masked(values, kept).sum(dtype=torch.float64), kept.sum().double())


@torch.no_grad()
def moments(values: Tensor, mask: Tensor | None = None) -> Moments:
    """Return the detached sum, count and sum of squares of the unmasked `values`."""
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    summands = masked(values, kept).double()
    return Moments(summands.sum(), kept.sum().double(), summands.square().sum())


def add_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Sum the metrics of micro-batches or ranks key by key; a key may be absent from some of them."""
    sums: Metrics = {}
    for part in parts:
        for key, mean in part.items():
            sums[key] = sums[key] + mean if key in sums else mean
    return sums


def encode_metrics(metrics: Metrics) -> bytes:
    """Write metrics as JSON, which keeps every bit of a float64."""
    return json.dumps(
        {name: [tensor.item() for tensor in vars(mean).values()] for name, mean in metrics.items()}
    ).encode()


def decode_metrics(text: bytes) -> Metrics:
    """Read the metrics that `encode_metrics` wrote in another process."""
    kinds = {2: Mean, 3: Moments}  # class by the number of its fields
    return {
        name: kinds[len(values)](*(torch.tensor(value, dtype=torch.float64) for value in values))
        for name, values in json.loads(text).items()
    }


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` in fp32, zero outside the mask; a multiplication would propagate NaNs, even into gradients."""
    return torch.where(mask.bool(), values.float(), 0.0)


def masked_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Like `masked`, but with a finite value for -inf, so that the ratio of two impossible tokens is 1, not NaN.

    An impossible token gets no gradient. If a token is impossible on only one side, the clamps on ratios bound it.
    """
    return masked(log_probs, mask).clamp(min=LOWEST_LOG_PROB)


def divide(total: Tensor, denominator: Denominator) -> Tensor:
    """Return `total / denominator`, or `total` if the denominator is 0, so that an empty step gives 0, not NaN."""
    return total / (denominator + (denominator == 0))


def sequence_sums(values: Tensor, mask: Tensor, rows: Tensor | None = None, num_sequences: int | None = None) -> Tensor:
    """Sum the unmasked tokens of each sequence, [sequences].

    `rows` gives each token's sequence number, counted from 0 within the micro-batch (any value at masked tokens).
    Without it, each row of a 2-D tensor is a sequence. `num_sequences` is the length of the result for packed tokens.
    By default it is the number of tokens, an upper bound that needs no synchronisation with the device; sequence
    numbers without tokens get zero.
    """
    kept = masked(values, mask)
    if rows is None:
        if values.dim() != 2:
            raise ValueError(
                f"`rows` is missing: expected values of shape [sequences, tokens] without it, got {list(values.shape)}"
            )
        return kept.sum(-1)
    sums = kept.new_zeros(rows.numel() if num_sequences is None else num_sequences)
    valid = torch.where(mask.bool(), rows, 0).long()  # masked tokens, such as padding (-1), add zero to sequence 0
    return sums.index_add(0, valid.flatten(), kept.flatten())


def sequence_means(
    values: Tensor, mask: Tensor, rows: Tensor | None = None, num_sequences: int | None = None
) -> Tensor:
    """Average each sequence over its unmasked tokens, [sequences]; zero for a fully masked sequence."""
    lengths = sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, rows, num_sequences)
    return divide(sequence_sums(values, mask, rows, num_sequences), lengths)


def to_tokens(per_sequence: Tensor, mask: Tensor, rows: Tensor | None = None) -> Tensor:
    """Broadcast one value per sequence [sequences] to its tokens, in the shape of `mask`."""
    if rows is None:
        return per_sequence.unsqueeze(-1).expand(mask.shape)
    return per_sequence[torch.where(mask.bool(), rows, 0).long()]  # arbitrary values at masked tokens


def sequence_count(mask: Tensor, rows: Tensor | None = None) -> Tensor:
    """Count the sequences with at least one unmasked token, for the denominator of seq-mean."""
    return (sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, rows) > 0).sum()


def aggregate(values: Tensor, mask: Tensor, mode: str, denominator: Denominator, rows: Tensor | None = None) -> Tensor:
    """Reduce per-token losses to this micro-batch's share of the loss of the whole optimizer step.

    `denominator` is the global count of that step: action tokens for token-mean (DAPO, arXiv 2503.14476), non-empty
    sequences for seq-mean (GRPO, arXiv 2402.03300), sequences times maximum length for constant (Dr. GRPO,
    arXiv 2503.20783). The shares of all micro-batches and ranks add up to the loss.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}: expected one of {', '.join(AGGREGATIONS)}")
    summands = sequence_means(values, mask, rows) if mode == "seq-mean" else masked(values, mask)
    return divide(summands.sum(), denominator)
