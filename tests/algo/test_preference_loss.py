"""Losses on pairs and unpaired rows: reward models, DPO, IPO and KTO."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from openrlhf.algo.preference_loss import (
    REWARD_LOSSES,
    chosen_nll,
    dpo,
    ipo,
    kto,
    kto_baseline,
    pairwise_logexp,
    pairwise_sigmoid,
)
from openrlhf.algo.reduce import add_metrics, mean_of
from tests.algo.cases import with_gradient

LOSSES = {
    "sigmoid": lambda chosen, rejected, count: pairwise_sigmoid(chosen, rejected, count),
    "margin": lambda chosen, rejected, count: pairwise_sigmoid(chosen, rejected, count, torch.full_like(chosen, 0.5)),
    "logexp": lambda chosen, rejected, count: pairwise_logexp(chosen, rejected, count),
    "dpo": lambda chosen, rejected, count: dpo(chosen, rejected, 0.1, count),
    "cdpo": lambda chosen, rejected, count: dpo(chosen, rejected, 0.1, count, 0.2),
    "ipo": lambda chosen, rejected, count: ipo(chosen, rejected, 0.1, count),
    "kto": lambda chosen, rejected, count: kto(chosen, rejected > 0, torch.tensor(0.3), 0.1, count, 1.0, 1.5),
}
PAIRS = st.lists(st.tuples(st.floats(-5, 5, width=16), st.floats(-5, 5, width=16)), min_size=1, max_size=8)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("name", REWARD_LOSSES)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1]])
def test_pairwise_loss_does_not_depend_on_the_batch_size(name, sizes):
    chosen, rejected = torch.tensor([1.0, 2, -2]), torch.tensor([0.0, 1, 0])
    parts = [
        REWARD_LOSSES[name](c, r, 3, None) for c, r in zip(chosen.split(sizes), rejected.split(sizes), strict=True)
    ]
    assert_close(sum(loss for loss, _ in parts), torch.tensor(0.91781775))
    metrics = add_metrics(metrics for _, metrics in parts)
    assert metrics["acc"].value.item() == pytest.approx(2 / 3)
    assert metrics["chosen_reward"].value.item() == pytest.approx(1 / 3)


def test_margin_is_subtracted_inside_the_sigmoid():
    loss, _ = pairwise_sigmoid(torch.tensor([2.0]), torch.tensor([0.0]), 1, torch.tensor([0.5]))
    assert loss.item() == pytest.approx(-math.log(sigmoid(1.5)))
    with pytest.raises(ValueError, match="margin"):
        pairwise_logexp(torch.ones(1), torch.ones(1), 1, torch.ones(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_matches_hand_computation(smoothing):
    loss, metrics = dpo(torch.tensor([3.0]), torch.tensor([-2.0]), 0.1, 1, smoothing)
    expected = -(1 - smoothing) * math.log(sigmoid(0.5)) - smoothing * math.log(sigmoid(-0.5))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["chosen_reward"].value.item() == pytest.approx(0.3)
    assert metrics["reject_reward"].value.item() == pytest.approx(-0.2)
    assert metrics["acc"].value == 1


def test_ipo_matches_hand_computation():
    loss, _ = ipo(torch.tensor([3.0, 0]), torch.tensor([-2.0, 0]), 0.1, 2)
    assert_close(loss, torch.tensor((0.0 + 25) / 2))


def test_nll_is_a_mean_of_means():
    log_probs, mask = torch.tensor([[-1.0, -3], [-5, torch.nan]]), torch.tensor([[1, 1], [1, 0]])
    loss, metrics = chosen_nll(log_probs, mask, 2)
    assert_close(loss, torch.tensor(3.5))
    assert metrics["nll"].value == 3


def test_kto_matches_hand_computation():
    ratios, labels = torch.tensor([2.0, -1.0]), torch.tensor([1, 0])
    loss, metrics = kto(ratios, labels, torch.tensor(0.5), 0.1, 2, desirable_weight=1.0, undesirable_weight=2.0)
    expected = (1 - sigmoid(0.1 * 1.5) + 2 * (1 - sigmoid(0.1 * 1.5))) / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics["chosen_reward"].value.item() == pytest.approx(0.2)
    assert metrics["reject_reward"].value.item() == pytest.approx(-0.1)


def test_kto_works_without_undesirable_rows():
    loss, metrics = kto(torch.tensor([2.0]), torch.tensor([True]), torch.tensor(0.0), 0.1, 1)
    assert loss.item() == pytest.approx(1 - sigmoid(0.2))
    assert metrics["reject_reward"].count == 0


def test_kto_baseline_is_not_negative_and_has_no_gradient():
    ratios = torch.tensor([1.0, -3.0], requires_grad=True)
    assert kto_baseline(mean_of(ratios)) == 0
    positive = kto_baseline(mean_of(ratios) + mean_of(torch.tensor([5.0])))
    assert positive == 1
    assert not positive.requires_grad


@given(PAIRS, st.integers(1, 4))
def test_kto_does_not_depend_on_micro_batches(pairs, size):
    ratios, mismatched = torch.tensor(pairs).unbind(-1)
    labels = ratios > mismatched
    mismatch = mean_of(torch.zeros(0))
    for part in mismatched.split(size):
        mismatch = mismatch + mean_of(part)
    baseline = kto_baseline(mismatch)
    assert_close(baseline, mismatched.mean().clamp(min=0))
    whole = with_gradient(lambda leaf: kto(leaf, labels, baseline, 0.1, len(pairs))[0], ratios)
    parts = [
        with_gradient(lambda leaf, label=label: kto(leaf, label, baseline, 0.1, len(pairs))[0], part)
        for part, label in zip(ratios.split(size), labels.split(size), strict=True)
    ]
    assert_close(sum(loss for loss, _ in parts), whole[0])
    assert_close(torch.cat([gradient for _, gradient in parts]), whole[1])


@pytest.mark.parametrize("name", LOSSES)
@given(pairs=PAIRS, size=st.integers(1, 4))
def test_splitting_changes_neither_value_nor_gradient(name, pairs, size):
    chosen, rejected = torch.tensor(pairs).unbind(-1)
    function = LOSSES[name]
    whole = with_gradient(lambda leaf: function(leaf, rejected, len(pairs))[0], chosen)
    parts = [
        with_gradient(lambda leaf, other=other: function(leaf, other, len(pairs))[0], part)
        for part, other in zip(chosen.split(size), rejected.split(size), strict=True)
    ]
    assert_close(sum(loss for loss, _ in parts), whole[0])
    assert_close(torch.cat([gradient for _, gradient in parts]), whole[1])


@pytest.mark.parametrize("name", LOSSES)
@given(pairs=PAIRS, data=st.data())
def test_the_order_of_pairs_does_not_matter(name, pairs, data):
    chosen, rejected = torch.tensor(pairs).unbind(-1)
    order = torch.tensor(data.draw(st.permutations(range(len(pairs)))))
    loss, metrics = LOSSES[name](chosen, rejected, len(pairs))
    shuffled, shuffled_metrics = LOSSES[name](chosen[order], rejected[order], len(pairs))
    assert_close(shuffled, loss)
    for key, mean in metrics.items():
        assert_close(shuffled_metrics[key].value, mean.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite(name, dtype):
    chosen = torch.linspace(-100, 100, 101, dtype=dtype)
    loss, gradient = with_gradient(lambda leaf: LOSSES[name](leaf, -chosen, 101)[0], chosen)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_without_pairs_adds_zero(name):
    loss, gradient = with_gradient(lambda leaf: LOSSES[name](leaf[:0], torch.zeros(0), 4)[0], torch.ones(2))
    assert loss == 0
    assert (gradient == 0).all()
