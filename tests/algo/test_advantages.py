"""Advantages and returns: GAE, discounted returns and their normalisation over ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from openrlhf.algo.advantages import ADVANTAGES, discounted_returns, gae, moments, normalize
from openrlhf.algo.shaping import SHAPING
from tests.algo.cases import batches, batches_with_split

DECAYS = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def naive_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    """Compute GAE token by token, over action tokens only."""
    result = torch.zeros_like(rewards)
    for row in range(len(mask)):
        advantage = next_value = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = values[row, t].item()
            advantage = rewards[row, t].item() + gamma * next_value - value + gamma * lambd * advantage
            next_value = value
            result[row, t] = advantage
    return result


def test_gae_matches_hand_computation():
    # delta = [0 + .9*2 - 1, 1 + 0 - 2] = [.8, -1]; A = [.8 + .9*.5*-1, -1]
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 2), 0.9, 0.5)
    assert_close(advantages, torch.tensor([[0.35, -1.0]]))
    assert_close(returns, torch.tensor([[1.35, 1.0]]))


def test_gae_skips_environment_tokens():
    rewards = torch.tensor([[0.0, 7.0, torch.nan, 1.0]])
    mask = torch.tensor([[1, 0, 0, 1]])
    assert_close(discounted_returns(rewards, mask, 0.5), torch.tensor([[0.5, 0, 0, 1]]))
    advantages, returns = gae(rewards, torch.tensor([[1.0, 9, torch.inf, 2]]), mask, 0.9, 0.5)
    assert_close(advantages, torch.tensor([[0.35, 0, 0, -1]]))
    assert_close(returns, torch.tensor([[1.35, 0, 0, 1]]))


def test_undiscounted_return_is_the_remaining_reward():
    rewards = torch.tensor([[1, 2, 3]], dtype=torch.bfloat16)
    got = discounted_returns(rewards, torch.tensor([[True, False, True]]), 1.0)
    assert_close(got, torch.tensor([[4.0, 0, 3]]))


def test_every_estimator_has_advantages_and_shaping():
    assert list(ADVANTAGES) == list(SHAPING)
    rewards, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2)
    for name, function in ADVANTAGES.items():
        advantages, returns = function(rewards, torch.zeros(1, 2), mask, 0.5, 1.0)
        assert_close(advantages, torch.tensor([[1.0, 2.0]]), msg=name)
        assert advantages.data_ptr() != returns.data_ptr()


@given(batches(2), DECAYS, DECAYS)
def test_gae_equals_a_loop_over_action_tokens(batch, gamma, lambd):
    rewards, values = batch.tensors
    advantages, returns = gae(rewards, values, batch.mask, gamma, lambd)
    expected = naive_gae(rewards, values, batch.mask, gamma, lambd)
    assert_close(advantages, expected)
    assert_close(returns, expected + torch.where(batch.mask, values, 0))


@given(batches(1), DECAYS)
def test_returns_equal_a_loop_over_action_tokens(batch, gamma):
    (rewards,) = batch.tensors
    expected = naive_gae(rewards, torch.zeros_like(rewards), batch.mask, gamma, 1.0)
    assert_close(discounted_returns(rewards, batch.mask, gamma), expected)


@given(batches(2), DECAYS, DECAYS)
def test_removing_environment_tokens_changes_nothing(batch, gamma, lambd):
    rewards, values = batch.tensors
    advantages, _ = gae(rewards, values, batch.mask, gamma, lambd)
    for row, mask in enumerate(batch.mask):
        alone = gae(rewards[row, mask][None], values[row, mask][None], mask[mask][None], gamma, lambd)[0]
        assert_close(advantages[row, mask], alone[0])


def test_normalisation_matches_hand_computation():
    advantages, mask = torch.tensor([[1.0, 3, torch.nan]]), torch.tensor([[1, 1, 0]])
    assert_close(normalize(advantages, mask), torch.tensor([[-1.0, 1, 0]]))
    assert_close(normalize(advantages + 1, mask, divide_by_std=False), torch.tensor([[-1.0, 1, 0]]))


def test_equal_advantages_normalise_to_zero():
    assert_close(normalize(torch.full((2, 3), 0.7), torch.ones(2, 3)), torch.zeros(2, 3))


def test_moments_are_accurate_for_a_large_mean():
    values = 10_000 + torch.tensor([[-0.5, 0.5]])
    assert_close(normalize(values, torch.ones(1, 2)), torch.tensor([[-1.0, 1.0]]))


@given(batches_with_split(1))
def test_moments_of_ranks_add_up(case):
    batch, parts = case
    (values,) = batch.tensors
    whole = normalize(values, batch.mask)
    first, *others = (moments(values[rows], batch.mask[rows]) for rows in parts)
    statistics = sum(others, start=first)
    for rows in parts:
        assert_close(normalize(values[rows], batch.mask[rows], statistics=statistics), whole[rows])
    assert_close(statistics.variance, values[batch.mask].double().var(correction=0))
