"""The policy loss: PPO and dual clipping, GSPO, corrections for rollout log-probs, entropy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from openrlhf.algo.policy_loss import CORRECTIONS, POLICY_LOSSES, entropy_loss, policy_loss
from openrlhf.algo.reduce import AGGREGATIONS, add_metrics, sequence_count
from openrlhf.config.sections.algorithm import PolicyLossFlags
from tests.algo.cases import (
    Batch,
    assert_packed_equals_padded,
    assert_split_adds_up,
    batches,
    batches_with_split,
    with_gradient,
)

SETTINGS = st.builds(
    PolicyLossFlags,
    policy_loss_type=st.sampled_from(list(POLICY_LOSSES)),
    eps_clip_low_high=st.sampled_from([(0.2, 0.2), (0.2, 0.28)]),
    dual_clip=st.sampled_from([None, 3.0]),
    loss_agg_mode=st.sampled_from(list(AGGREGATIONS)),
    enable_vllm_is_correction=st.booleans(),
    vllm_is_correction_type=st.sampled_from(list(CORRECTIONS)),
)


def corrected(kind="tis", **more):
    """Options with this correction; without any for None."""
    if kind is None:
        return PolicyLossFlags(**more)
    return PolicyLossFlags(enable_vllm_is_correction=True, vllm_is_correction_type=kind, **more)


def loss_of(
    batch: Batch, leaf: Tensor, denominator: Tensor, settings: PolicyLossFlags, rows: Tensor | None = None
) -> Tensor:
    _, old, advantages, rollout = batch.tensors
    return policy_loss(leaf, old, advantages, batch.mask, denominator, settings, rollout, rows)[0]


def denominator_of(batch: Batch, settings: PolicyLossFlags) -> Tensor:
    return sequence_count(batch.mask) if settings.aggregation == "seq-mean" else batch.mask.sum()


def one_token(log_ratio: float, advantage: float, settings: PolicyLossFlags) -> tuple[float, float]:
    old, mask = torch.zeros(1, 1), torch.ones(1, 1)
    loss, gradient = with_gradient(
        lambda leaf: policy_loss(leaf, old, torch.tensor([[advantage]]), mask, 1, settings)[0],
        torch.tensor([[log_ratio]]),
    )
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, -1.0, -1.0),  # below the range, but not clipped: the loss still falls with the ratio
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipping_matches_hand_computation(ratio, advantage, loss, gradient):
    settings = PolicyLossFlags(eps_clip_low_high=(0.2, 0.28))
    got = one_token(torch.tensor(ratio).log().item(), advantage, settings)
    assert got == pytest.approx((loss, gradient), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(2.0, -1.0, 2.0, 2.0), (5.0, -1.0, 3.0, 0.0), (5.0, 1.0, -1.2, 0.0)],
)
def test_dual_clip_bounds_only_bad_actions(ratio, advantage, loss, gradient):
    got = one_token(torch.tensor(ratio).log().item(), advantage, PolicyLossFlags(dual_clip=3.0))
    assert got == pytest.approx((loss, gradient), rel=1e-5)


def test_gspo_uses_the_geometric_mean_of_a_sequence():
    log_probs = torch.tensor([[0.3, -0.1, torch.nan], [0.2, 0.2, 0.2]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    zeros, advantages = torch.zeros(2, 3), torch.tensor([[2.0] * 3, [-1.0] * 3])
    settings = PolicyLossFlags(policy_loss_type="gspo", eps_clip=0.5)
    loss, gradient = with_gradient(lambda leaf: policy_loss(leaf, zeros, advantages, mask, 2, settings)[0], log_probs)
    first, second = torch.tensor(0.1).exp(), torch.tensor(0.2).exp()
    assert_close(loss, (-2 * first + second) / 2)
    assert_close(gradient, torch.tensor([[-first / 2, -first / 2, 0], [second / 6] * 3]))


def test_gspo_with_correction_uses_the_engines_log_probs():
    log_probs, old, rollout = torch.full((1, 2), 0.1), torch.zeros(1, 2), torch.full((1, 2), 0.05)
    settings = corrected(policy_loss_type="gspo")
    ones = torch.ones(1, 2)
    loss, metrics = policy_loss(log_probs, old, ones, ones, 1, settings, rollout)
    assert_close(loss, -torch.tensor(0.05).exp())
    assert "is_filter_ratio" not in metrics


def test_seq_mean_matches_hand_computation():
    log_probs, mask = torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([[2.0, 2], [1, 0]])
    settings = PolicyLossFlags(loss_agg_mode="seq-mean")
    loss, gradient = with_gradient(
        lambda leaf: policy_loss(leaf, log_probs, advantages, mask, 2, settings)[0], log_probs
    )
    assert_close(loss, torch.tensor(-1.5))
    assert_close(gradient, torch.tensor([[-0.5, -0.5], [-0.5, 0]]))


@pytest.mark.parametrize(
    ("correction", "weights", "dropped"),
    [("tis", [0.5, 5.0, 2.0], 0.0), ("icepop", [0.0, 0.0, 2.0], 2 / 3)],
)
def test_token_corrections_match_hand_computation(correction, weights, dropped):
    log_weight = torch.tensor([[0.1, 9.0, 2.0, torch.nan]]).log()
    zeros, ones = torch.zeros(1, 4), torch.ones(1, 4)
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = policy_loss(zeros, zeros, ones, mask, 1, corrected(correction), -log_weight)
    assert_close(loss, -torch.tensor(sum(weights)))
    assert_close(metrics["is_filter_ratio"].value.item(), dropped)


def test_sequence_mask_is_decided_by_the_geometric_mean():
    log_weight = torch.tensor([[1.0, -1.0], [2.0, 2.0]])
    zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
    loss, metrics = policy_loss(zeros, zeros, ones, ones, 1, corrected("seq-mask-tis"), -log_weight)
    assert_close(loss, -torch.tensor(torch.e + 0.5))  # e^-1 is clipped to 0.5
    assert metrics["is_filter_ratio"].value == 0.5


def test_sequence_mask_is_finite_when_extremes_cancel():
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    settings = corrected("seq-mask-tis")
    loss, _ = policy_loss(zeros, zeros, ones, ones, 1, settings, torch.tensor([[100.0, -100]]))
    assert_close(loss, torch.tensor(-5.5))


@pytest.mark.parametrize(("correction", "weight"), [(None, 1.0), ("tis", torch.e**0.5)])
def test_only_the_current_log_probs_receive_a_gradient(correction, weight):
    """A single on-policy step passes them as the old ones too: the ratio is 1, and its gradient must remain."""
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    settings = corrected(correction)
    _, gradient = with_gradient(lambda leaf: policy_loss(leaf, leaf, ones, ones, 1, settings, zeros - 0.5)[0], zeros)
    assert_close(gradient, torch.full((1, 1), -weight))


def test_diagnostics_match_hand_computation():
    log_probs, old = torch.tensor([[0.5, 100.0, torch.nan]]), torch.zeros(1, 3)
    rollout, mask = torch.tensor([[0.1, 0.3, torch.nan]]), torch.tensor([[1, 1, 0]])
    settings = corrected()
    _, metrics = policy_loss(log_probs, old, torch.tensor([[1.0, -1, 0]]), mask, 2, settings, rollout)
    assert metrics["ppo_kl"].value.item() == pytest.approx(-50.25)  # unclamped
    assert metrics["engine_kl"].value.item() == pytest.approx(0.2)
    assert metrics["clip_ratio"].value.item() == 0.5


def test_entropy_loss_is_the_negative_mean_entropy():
    entropy, mask = torch.tensor([[1.0, 3, torch.nan]]), torch.tensor([[1, 1, 0]])
    loss, metrics = entropy_loss(entropy, mask, 2)
    assert_close(loss, torch.tensor(-2.0))
    assert metrics["entropy"].value == 2


def test_correction_needs_the_engines_log_probs():
    with pytest.raises(ValueError, match="rollout"):
        policy_loss(*[torch.ones(1, 1)] * 4, 1, corrected())


@given(batches_with_split(4), SETTINGS)
def test_splitting_changes_neither_value_nor_gradient(case, settings):
    batch, parts = case
    denominator = denominator_of(batch, settings)
    assert_split_adds_up(lambda part, leaf: loss_of(part, leaf, denominator, settings), batch, parts)


@given(batches_with_split(4), SETTINGS)
def test_metrics_of_micro_batches_add_up(case, settings):
    batch, parts = case
    new, old, advantages, rollout = batch.tensors
    whole = policy_loss(new, old, advantages, batch.mask, 1, settings, rollout)[1]
    pieces = [batch.rows(rows) for rows in parts]
    added = add_metrics(
        policy_loss(*piece.tensors[:3], piece.mask, 1, settings, piece.tensors[3])[1] for piece in pieces
    )
    assert {key: mean.count for key, mean in added.items()} == {key: mean.count for key, mean in whole.items()}
    for key, mean in whole.items():
        assert_close(added[key].total, mean.total)


@given(batches(4), SETTINGS)
def test_packed_equals_padded(batch, settings):
    denominator = denominator_of(batch, settings)
    assert_packed_equals_padded(lambda part, leaf, rows: loss_of(part, leaf, denominator, settings, rows), batch)


@given(batches(4, min_rows=2), SETTINGS)
def test_a_fully_masked_row_contributes_nothing(batch, settings):
    mask = batch.mask.clone()
    mask[0], mask[1, 0] = False, True
    holed = Batch(tuple(torch.where(mask, tensor.nan_to_num(), torch.nan) for tensor in batch.tensors), mask)
    rest = holed.rows(torch.arange(1, len(mask)))
    denominator = denominator_of(holed, settings)
    assert denominator == denominator_of(rest, settings)
    assert_split_adds_up(
        lambda part, leaf: loss_of(part, leaf, denominator, settings), holed, [torch.arange(1, len(mask))]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=12), st.data())
def test_extreme_ratios_stay_finite(dtype, log_ratios, data):
    settings = data.draw(SETTINGS)
    log_probs = torch.tensor([log_ratios], dtype=dtype)
    zeros, mask = torch.zeros_like(log_probs), torch.ones_like(log_probs)
    signs = torch.tensor([[1.0 if i % 2 else -1.0 for i in range(len(log_ratios))]], dtype=dtype)
    for rollout in (log_probs.flip(-1), -log_probs):
        loss, gradient = with_gradient(
            lambda leaf, rollout=rollout: policy_loss(leaf, zeros, signs, mask, 1, settings, rollout)[0], log_probs
        )
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert gradient.isfinite().all()


@given(st.lists(st.sampled_from([-torch.inf, -0.5, -3.0]), min_size=8, max_size=8), SETTINGS)
def test_tokens_of_probability_zero_stay_finite(values, settings):
    log_probs, old, rollout, reverse = (torch.tensor([values]).roll(shift) for shift in (0, 1, 3, 4))
    ones, signs = torch.ones(1, 8), torch.tensor([[1.0, -1.0] * 4])
    for behaviour in (rollout, log_probs, reverse):
        loss, gradient = with_gradient(
            lambda leaf, old=behaviour: policy_loss(leaf, old, signs, ones, 8, settings, rollout)[0], log_probs
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
    _, metrics = policy_loss(log_probs, old, signs, ones, 8, settings, rollout)
    assert all(mean.value.isfinite() for mean in metrics.values())


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
def test_a_token_of_probability_zero_everywhere_has_ratio_one_and_no_gradient(correction):
    never, ones = torch.full((1, 1), -torch.inf), torch.ones(1, 1)
    loss, gradient = with_gradient(
        lambda leaf: policy_loss(leaf, never, 2 * ones, ones, 1, corrected(correction), never)[0],
        never,
    )
    assert (loss.item(), gradient.item()) == (-2.0, 0.0)
