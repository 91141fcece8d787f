"""Hypothesis strategies and checks for the properties that every loss has.

`batches` draws ragged multi-turn batches. `assert_split_adds_up` and `assert_packed_equals_padded` check the two rules
of this package: splitting a batch into micro-batches, or packing its rows, changes neither a loss nor its gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close


@dataclass(frozen=True)
class Batch:
    """Named token tensors, each [batch, tokens], and their mask; masked slots of the tensors hold NaN."""

    tensors: tuple[Tensor, ...]
    mask: Tensor

    def rows(self, index: Tensor) -> "Batch":
        return Batch(tuple(tensor[index] for tensor in self.tensors), self.mask[index])

    def packed(self) -> tuple["Batch", Tensor]:
        """Return all tokens in one row, and the row id of each; padding at the end has row id -1."""
        numbers = torch.arange(len(self.mask)).unsqueeze(-1).expand(self.mask.shape)
        pad = torch.zeros(3)
        flat = tuple(torch.cat([tensor.flatten(), pad * torch.nan]) for tensor in self.tensors)
        batch = Batch(flat, torch.cat([self.mask.flatten(), pad.bool()]))
        return batch, torch.cat([numbers.flatten(), pad.long() - 1])


@st.composite
def batches(draw: st.DrawFn, num_tensors: int, scale: float = 1.0, min_rows: int = 1) -> Batch:
    """Draw up to 6 rows of up to 9 tokens with gaps between turns; rows may be fully masked, but not all of them."""
    shape = draw(st.integers(min_rows, 6)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    mask[draw(st.integers(0, shape[0] - 1)), 0] = True
    noise = [scale * torch.randn(shape, generator=generator) for _ in range(num_tensors)]
    return Batch(tuple(tensor.masked_fill(~mask, torch.nan) for tensor in noise), mask)


@st.composite
def batches_with_split(draw: st.DrawFn, num_tensors: int) -> tuple[Batch, list[Tensor]]:
    """Draw a batch and a split of its shuffled rows into up to three micro-batches, of one rank or several."""
    batch = draw(batches(num_tensors))
    owner = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=len(batch.mask), max_size=len(batch.mask))))
    order = torch.tensor(draw(st.permutations(range(len(batch.mask)))))
    return batch, [order[owner == part] for part in range(3) if bool((owner == part).any())]


@st.composite
def rewards_in_ragged_groups(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rewards from a small set (so that constant groups occur), arbitrary group ids, and a permutation."""
    ids = draw(st.lists(st.sampled_from([-7, 0, 3, 10**12]), min_size=1, max_size=16))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 1e4]), min_size=len(ids), max_size=len(ids)))
    return torch.tensor(rewards), torch.tensor(ids), torch.tensor(draw(st.permutations(range(len(ids)))))


def with_gradient(function: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scalar `function(leaf)` and its gradient."""
    leaf = leaf.detach().clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def assert_split_adds_up(function: Callable[[Batch, Tensor], Tensor], batch: Batch, parts: Sequence[Tensor]) -> None:
    """Check that `function(batch, first tensor)` is the sum over micro-batches, in value and in gradient."""
    whole, whole_gradient = with_gradient(lambda leaf: function(batch, leaf), batch.tensors[0])
    total, gradient = torch.zeros(()), torch.zeros_like(whole_gradient)
    for rows in parts:
        part = batch.rows(rows)
        loss, gradient[rows] = with_gradient(lambda leaf, part=part: function(part, leaf), part.tensors[0])
        total = total + loss
    assert_close(total, whole)
    assert_close(gradient, whole_gradient)
    assert not gradient[~batch.mask].any()


def assert_packed_equals_padded(function: Callable[[Batch, Tensor, Tensor | None], Tensor], batch: Batch) -> None:
    """Check that `function(batch, first tensor, rows)` is the same for [batch, tokens] and for one packed row."""
    padded, padded_gradient = with_gradient(lambda leaf: function(batch, leaf, None), batch.tensors[0])
    line, rows = batch.packed()
    packed, packed_gradient = with_gradient(lambda leaf: function(line, leaf, rows), line.tensors[0])
    assert_close(packed, padded)
    assert_close(packed_gradient[:-3].view_as(padded_gradient), padded_gradient)
