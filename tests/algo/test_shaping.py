"""Reward shaping: group baselines, penalties, clipping and group filtering."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from openrlhf.algo.shaping import (
    SHAPING,
    WHITENED,
    group_is_kept,
    group_norm,
    group_stats,
    overlong_penalty,
    response_lengths,
    spread,
    stop_properly_penalty,
)
from tests.algo.cases import batches, rewards_in_ragged_groups

ONE_GROUP = torch.zeros(4, dtype=torch.long)
NEEDS_GROUPS = {"rloo", "reinforce_baseline", "group_norm", "dr_grpo"}


def naive(estimator: str, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Compute the shaping group by group, sample by sample."""
    shaped = []
    for reward, group_id in zip(rewards.double(), group_ids, strict=True):
        group = rewards.double()[group_ids == group_id]
        n = len(group)
        if estimator in ("gae", "reinforce"):
            shaped.append(reward)
        elif n == 1:
            shaped.append(torch.tensor(0.0))
        elif estimator == "rloo":
            shaped.append(reward - (group.sum() - reward) / (n - 1))
        elif estimator == "group_norm":
            constant = bool((group == group[0]).all())
            shaped.append(torch.tensor(0.0) if constant else (reward - group.mean()) / (group.std() + 1e-9))
        else:
            shaped.append(reward - group.mean())
    return torch.stack([value.float() for value in shaped])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("gae", [1.0, 0, 0, 0]),
        ("reinforce", [1.0, 0, 0, 0]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_baseline", [0.75, -0.25, -0.25, -0.25]),
        ("group_norm", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_shaping_of_one_success_in_four_matches_hand_computation(estimator, expected):
    got = SHAPING[estimator](torch.tensor([1, 0, 0, 0]), ONE_GROUP)
    assert_close(got, torch.tensor(expected))


def test_every_estimator_belongs_to_the_right_sets():
    assert set(SHAPING) == {"gae", "reinforce", *NEEDS_GROUPS}
    assert set(SHAPING) > WHITENED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("estimator", SHAPING)
def test_shaping_computes_in_fp32(dtype, estimator):
    rewards = torch.tensor([300, 301, 300, 302])
    got = SHAPING[estimator](rewards.to(dtype), ONE_GROUP)
    assert_close(got, SHAPING[estimator](rewards.to(dtype).float(), ONE_GROUP))
    assert got.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("estimator", sorted(NEEDS_GROUPS))
def test_a_constant_group_gets_exact_zeros(size, estimator):
    for value in (0.1, -0.7, 1e4 / 3):
        got = SHAPING[estimator](torch.full((size,), value), torch.full((size,), 5))
        assert (got == 0).all()


@pytest.mark.parametrize("estimator", SHAPING)
@given(case=rewards_in_ragged_groups())
def test_shaping_equals_a_loop_over_ragged_groups(estimator, case):
    rewards, group_ids, _ = case
    assert_close(SHAPING[estimator](rewards, group_ids), naive(estimator, rewards, group_ids), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("estimator", SHAPING)
@given(case=rewards_in_ragged_groups())
def test_shaping_ignores_the_order_of_samples(estimator, case):
    rewards, group_ids, permutation = case
    shape = SHAPING[estimator]
    assert_close(shape(rewards, group_ids)[permutation], shape(rewards[permutation], group_ids[permutation]))


@given(rewards_in_ragged_groups())
def test_group_stats_equal_a_loop(case):
    rewards, group_ids, _ = case
    stats = group_stats(rewards, group_ids)
    for i, group_id in enumerate(group_ids):
        group = rewards[group_ids == group_id]
        std = group.double().std().float() if len(group) > 1 else torch.tensor(0.0)
        assert_close(stats.mean[i], group.double().mean().float())
        assert_close(stats.std[i], std)
        assert (stats.low[i], stats.high[i], stats.size[i]) == (group.min(), group.max(), len(group))


def test_length_is_the_span_of_the_actions():
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    assert response_lengths(mask).tolist() == [3, 5, 0, 1]


def test_overlong_penalty_keeps_the_fraction_of_integer_rewards():
    rewards = overlong_penalty(torch.tensor([1, 1]), torch.tensor([2, 1]), max_len=2, buffer=1, factor=0.5)
    assert_close(rewards, torch.tensor([0.5, 1.0]))
    assert_close(SHAPING["dr_grpo"](rewards, torch.tensor([0, 0])), torch.tensor([-0.25, 0.25]))


def test_overlong_penalty_grows_over_the_buffer_and_stops():
    got = overlong_penalty(torch.zeros(5), torch.tensor([6, 8, 9, 10, 12]), max_len=10, buffer=4, factor=2.0)
    assert_close(got, torch.tensor([0.0, -1.0, -1.5, -2.0, -2.0]))


def test_overlong_buffer_must_fit():
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.zeros(1), torch.ones(1), max_len=2, buffer=3, factor=1.0)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [
        (0.0, [0.0, -2.0, 2.0]),
        (0.5, [1.0, -2.0, 2.0]),
        (1.0, [2.0, -2.0, 2.0]),
        (-0.5, [-0.5, -2.0, 2.0]),
    ],
)
def test_truncation_never_increases_the_reward(coef, expected):
    got = stop_properly_penalty(torch.tensor([2, -2, 2]), torch.tensor([True, True, False]), coef)
    assert_close(got, torch.tensor(expected))


def test_stop_properly_coefficient_above_one_is_rejected():
    with pytest.raises(ValueError, match="at most 1"):
        stop_properly_penalty(torch.ones(1), torch.ones(1), 1.5)


def test_spread_matches_hand_computation():
    kl = torch.tensor([0.1, 9, 0.3, torch.nan, 1, 1, 1, 1])  # two samples of four tokens
    action_mask = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0])
    got = spread(torch.tensor([5, 7]), torch.tensor([2, -1]), kl, action_mask, 0.5)
    assert_close(got, torch.tensor([-0.05, 0, 4.85, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("kl_coef", [0.0, -1.0])
def test_spread_without_penalty_puts_the_reward_at_the_end(kl_coef):
    mask, last = torch.tensor([1, 1, 0]), torch.tensor([1])
    expected = torch.tensor([0.0, 5, 0])
    assert_close(spread(torch.tensor([5.0]), last, torch.ones(3), mask, kl_coef), expected)
    assert_close(spread(torch.tensor([5.0]), last, None, mask, 1.0), expected)


@given(batches(1))
def test_spread_keeps_the_sum(batch):
    (kl,) = batch.tensors
    rewards = torch.arange(1.0, len(kl) + 1)
    expected = torch.where(batch.mask.any(-1), rewards, 0) - 0.1 * torch.where(batch.mask, kl, 0).sum(-1)
    places = torch.arange(kl.numel()).view_as(kl)
    last = torch.where(batch.mask, places, -1).amax(-1)  # in the flattened batch
    assert_close(spread(rewards, last, kl.flatten(), batch.mask.flatten(), 0.1).view_as(kl).sum(-1), expected)


def test_filter_keeps_groups_strictly_inside_the_range():
    groups = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [0.1, 0.1, 0.1]]
    assert [group_is_kept(scores, 0, 1) for scores in groups] == [True, False, False, True, True]
    assert not group_is_kept(groups[-1], 0.1, 1)


def test_filter_range_must_be_ordered():
    with pytest.raises(ValueError, match="low < high"):
        group_is_kept([1.0], 1, 1)


def test_group_norm_of_near_equal_rewards_is_finite():
    got = group_norm(torch.tensor([1.0, 1.0 + 1e-7, 1.0, 1.0]), ONE_GROUP)
    assert got.isfinite().all()
