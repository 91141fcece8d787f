"""The critic's loss with and without clipping."""

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from openrlhf.algo.value_loss import value_loss
from tests.algo.cases import (
    assert_packed_equals_padded,
    assert_split_adds_up,
    batches,
    batches_with_split,
    with_gradient,
)


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (0.2, 0.5 * 0.8**2, -0.8),  # within the range: unclipped
        (0.9, 0.5 * 0.5**2, 0.0),  # clipped to 0.5, which has the larger loss
        (-0.9, 0.5 * 1.9**2, -1.9),  # moving away: the unclipped loss is larger
    ],
)
def test_clipping_matches_hand_computation(value, loss, gradient):
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    got = with_gradient(lambda leaf: value_loss(leaf, zero, one, one, 1, 0.5)[0], torch.tensor([[value]]))
    assert_close(torch.stack([got[0], got[1][0, 0]]), torch.tensor([loss, gradient]))


def test_without_clipping_the_loss_is_squared_error():
    values, returns = torch.tensor([[2.0, torch.nan]]), torch.tensor([[0.0, torch.nan]])
    loss, metrics = value_loss(values, values, returns, torch.tensor([[1, 0]]), 4, None)
    assert_close(loss, torch.tensor(0.5))
    assert metrics["values"].value == 2


@pytest.mark.slow(seconds=3)
@given(batches_with_split(3))
def test_splitting_changes_neither_value_nor_gradient(case):
    batch, parts = case
    tokens = batch.mask.sum()
    assert_split_adds_up(lambda part, leaf: value_loss(leaf, *part.tensors[1:], part.mask, tokens)[0], batch, parts)


@given(batches(3))
def test_packed_equals_padded(batch):
    assert_packed_equals_padded(lambda part, leaf, _: value_loss(leaf, *part.tensors[1:], part.mask, 5)[0], batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_values_stay_finite(dtype):
    values = torch.linspace(-100, 100, 101, dtype=dtype).unsqueeze(0)
    zeros = torch.zeros_like(values)
    loss, gradient = with_gradient(lambda leaf: value_loss(leaf, zeros, -values, zeros == 0, 101)[0], values)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert gradient.isfinite().all()
