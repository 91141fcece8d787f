"""KL estimators, the KL loss and the controllers of its coefficient."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from openrlhf.algo.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_controller, kl_loss, kl_penalty
from openrlhf.algo.reduce import sequence_count
from tests.algo.cases import (
    assert_packed_equals_padded,
    assert_split_adds_up,
    batches,
    batches_with_split,
    with_gradient,
)

ESTIMATORS = list(KL_ESTIMATORS)
ONES = torch.ones(1, 3)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -0.5, 0.0]), ("k2", [0.125, 0.125, 0.0]), ("k3", [0.10653066, 0.14872127, 0.0])],
)
def test_estimators_match_hand_computation(estimator, expected):
    log_probs = torch.tensor([[-1.0, -2, -3]])
    got = kl_penalty(log_probs, torch.tensor([[-1.5, -1.5, -3]]), ONES, estimator)
    assert_close(got, torch.tensor([expected]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_penalty_is_clamped_and_masked(estimator):
    log_probs = torch.tensor([[100.0, -100, torch.nan]])
    got = kl_penalty(log_probs, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]), estimator)
    assert got.abs().max() == 10
    assert got[0, 2] == 0


def test_k1_keeps_its_sign_and_the_others_are_never_negative():
    log_probs = torch.linspace(-100, 100, 2001).unsqueeze(0)
    assert kl_penalty(log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs), "k1").min() == -10
    for estimator in ("k2", "k3"):
        values = kl_penalty(log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs), estimator)
        assert values.min() >= 0
        assert values.max() == 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_loss_is_finite_for_extreme_ratios(dtype, estimator, unbiased):
    log_probs = torch.linspace(-100, 100, 401).unsqueeze(0).to(dtype)
    zeros = torch.zeros_like(log_probs)
    loss, gradient = with_gradient(
        lambda leaf: kl_loss(leaf, zeros, zeros == 0, 401, estimator, old_log_probs=zeros if unbiased else None)[0],
        log_probs,
    )
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 1.0), ("k2", 10.0), ("k3", 1 - torch.e**-10)])
def test_loss_has_a_gradient_at_the_largest_drift(estimator, expected):
    _, gradient = with_gradient(
        lambda leaf: kl_loss(leaf, torch.zeros(1, 1), torch.ones(1, 1), 1, estimator)[0], torch.tensor([[50.0]])
    )
    assert_close(gradient, torch.tensor([[expected]]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_gradient_keeps_the_value_and_weights_k1(estimator):
    log_probs, ref = torch.tensor([[-1.0, -2, -0.5]]), torch.tensor([[-1.5, -1, -2.5]])
    old = torch.tensor([[-1.0, -2.5, -9.0]])  # ratios 1, e^0.5 and, over the limit, e^8.5
    plain = kl_loss(log_probs, ref, ONES, 1, estimator)[0]
    loss, gradient = with_gradient(lambda leaf: kl_loss(leaf, ref, ONES, 1, estimator, old_log_probs=old)[0], log_probs)
    assert_close(loss, plain)
    assert_close(gradient, torch.tensor([[0.5, -(torch.e**0.5), 20.0]]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("unbiased", [False, True])
@given(pairs=st.lists(st.tuples(*[st.sampled_from([-torch.inf, -0.5, -3.0])] * 3), min_size=1, max_size=6))
def test_tokens_of_probability_zero_stay_finite(estimator, unbiased, pairs):
    log_probs, ref, old = torch.tensor(pairs).T.unsqueeze(1)
    mask = torch.ones_like(log_probs)
    penalty = kl_penalty(log_probs, ref, mask, estimator)
    loss, gradient = with_gradient(
        lambda leaf: kl_loss(leaf, ref, mask, 1, estimator, old_log_probs=old if unbiased else None)[0], log_probs
    )
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert penalty.abs().max() <= 10
    both = log_probs.isinf() & ref.isinf()
    assert not penalty[both].any()
    assert not gradient[log_probs.isinf()].any()


def test_a_token_impossible_under_the_reference_keeps_the_gradient_of_the_limit():
    log_probs, never = torch.tensor([[-1.0]]), torch.tensor([[-torch.inf]])
    for old in (None, log_probs):
        loss, gradient = with_gradient(
            lambda leaf, old=old: kl_loss(leaf, never, torch.ones(1, 1), 1, "k2", old_log_probs=old)[0], log_probs
        )
        assert (loss.item(), gradient.item()) == (50.0, 10.0)


def test_plain_k1_gradient_is_constant():
    _, gradient = with_gradient(lambda leaf: kl_loss(leaf, torch.zeros(1, 3), ONES, 1, "k1")[0], torch.randn(1, 3))
    assert_close(gradient, ONES)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(case=batches_with_split(3))
def test_splitting_the_batch_changes_nothing(estimator, case):
    batch, parts = case
    count = sequence_count(batch.mask)
    assert_split_adds_up(
        lambda part, leaf: kl_loss(
            leaf, part.tensors[1], part.mask, count, estimator, "seq-mean", old_log_probs=part.tensors[2]
        )[0],
        batch,
        parts,
    )


@given(batches(2))
def test_packed_equals_padded(batch):
    assert_packed_equals_padded(
        lambda part, leaf, rows: kl_loss(leaf, part.tensors[1], part.mask, 5.0, "k3", "seq-mean", rows)[0], batch
    )


def test_fixed_controller_never_changes():
    assert kl_controller(0.01, None, 10000).updated(5.0, 1024) == FixedKL(0.01)


@pytest.mark.parametrize(("kl", "expected"), [(6.0, 0.1), (6.6, 0.1 * 1.01), (60.0, 0.1 * 1.02), (0.0, 0.1 * 0.98)])
def test_adaptive_controller_matches_hand_computation(kl, expected):
    controller = kl_controller(0.1, 6.0, 10000).updated(kl, 1000)
    assert controller.coef == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "coef"), [(10_000, 0.08), (30_000, 0.04), (100_000, 0.02)])
def test_a_rollout_larger_than_the_horizon_keeps_the_coefficient_positive(samples, coef):
    assert AdaptiveKL(0.1, 6.0, 10_000).updated(0.0, samples).coef == pytest.approx(coef)


def test_adaptive_controller_is_restored_from_a_checkpoint():
    controller = AdaptiveKL(0.1, 6.0, 10000).updated(60.0, 1000)
    assert AdaptiveKL(**dataclasses.asdict(controller)) == controller


def test_adaptive_controller_needs_a_positive_target():
    with pytest.raises(ValueError, match="positive"):
        kl_controller(0.1, 0.0, 10000)
