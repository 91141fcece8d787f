"""Aggregation of token losses with a global denominator."""

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from openrlhf.algo.reduce import (
    add_metrics,
    aggregate,
    divide,
    mean_of,
    sequence_count,
    sequence_means,
    sequence_sums,
    to_tokens,
)
from tests.algo.cases import assert_packed_equals_padded, assert_split_adds_up, batches, batches_with_split

NAN = torch.nan
LOSSES = torch.tensor([[1.0, 2, NAN], [3, 4, 5], [7, NAN, NAN]])
MASK = ~LOSSES.isnan()


def test_token_mean_of_six_tokens():
    assert_close(aggregate(LOSSES, MASK, "token-mean", 6), torch.tensor(22 / 6))


def test_token_mean_over_two_ranks_is_the_global_mean():
    shares = [aggregate(LOSSES[rank], MASK[rank], "token-mean", 6) for rank in (slice(0, 1), slice(1, 3))]
    assert_close(sum(shares), torch.tensor(22 / 6))


def test_micro_batches_of_two_and_five_tokens():
    first, second = torch.tensor([[1.0, 3]]), torch.tensor([[2.0, 2, 2, 2, 10]])
    shares = [aggregate(part, torch.ones_like(part), "token-mean", 7) for part in (first, second)]
    assert_close(sum(shares), torch.tensor(22 / 7))
    assert not torch.isclose(sum(shares), (first.mean() + second.mean()) / 2)


def test_sequence_mean_counts_sequences_not_tokens():
    losses = torch.tensor([[1.0, 3], [2, 4], [8, NAN]])
    got = aggregate(losses, ~losses.isnan(), "seq-mean", 3)
    assert_close(got, torch.tensor((2 + 3 + 8) / 3))


def test_a_fully_masked_sequence_is_not_counted():
    losses, mask = torch.tensor([[1.0, 3], [5, 7]]), torch.tensor([[1, 1], [0, 0]])
    assert sequence_count(mask) == 1
    assert_close(aggregate(losses, mask, "seq-mean", sequence_count(mask)), torch.tensor(2.0))


def test_constant_mode_divides_by_the_given_number():
    assert_close(aggregate(LOSSES, MASK, "constant", 3 * 10), torch.tensor(22 / 30))


def test_unknown_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match="token-mean, seq-mean, constant"):
        aggregate(LOSSES, MASK, "mean", 1)


def test_packed_tokens_without_row_ids_are_rejected():
    with pytest.raises(ValueError, match="`rows` is missing"):
        sequence_sums(torch.ones(3), torch.ones(3))


def test_an_empty_mean_is_zero():
    assert divide(torch.tensor(0.0), 0) == 0
    assert divide(torch.tensor(0.0), torch.tensor(0)) == 0
    assert mean_of(torch.ones(2), torch.zeros(2)).value == 0


def test_packed_sequences_match_hand_computation():
    values, rows = torch.tensor([1.0, 2, 3, 4, 9]), torch.tensor([0, 0, 2, 2, -5])
    mask = torch.tensor([1, 1, 1, 1, 0])
    assert_close(sequence_sums(values, mask, rows, 3), torch.tensor([3.0, 0, 7]))
    means = sequence_means(values, mask, rows, 3)
    assert_close(means, torch.tensor([1.5, 0, 3.5]))
    assert_close(to_tokens(means, mask, rows)[:4], torch.tensor([1.5, 1.5, 3.5, 3.5]))
    assert sequence_count(mask, rows) == 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean", "constant"])
@given(case=batches_with_split(1))
def test_splitting_changes_neither_value_nor_gradient(mode, case):
    batch, parts = case
    denominator = sequence_count(batch.mask) if mode == "seq-mean" else batch.mask.sum()
    assert_split_adds_up(lambda part, leaf: aggregate(leaf, part.mask, mode, denominator), batch, parts)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean", "constant"])
@given(batch=batches(1))
def test_packed_equals_padded(mode, batch):
    assert_packed_equals_padded(lambda part, leaf, rows: aggregate(leaf, part.mask, mode, 7.0, rows), batch)


@given(batches_with_split(1))
def test_metrics_of_micro_batches_add_up(case):
    batch, parts = case
    (values,) = batch.tensors
    merged = add_metrics({"x": mean_of(values[rows], batch.mask[rows])} for rows in parts)
    assert_close(merged["x"].value, values[batch.mask].double().mean())
