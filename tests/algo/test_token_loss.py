"""Losses on tokens: SFT, distillation and process reward models."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch.testing import assert_close

from openrlhf.algo.token_loss import kd_loss, kd_terms, prm_loss, sft_loss
from tests.algo.cases import (
    assert_split_adds_up,
    batches_with_split,
    with_gradient,
)

INF, NAN = torch.inf, torch.nan


def test_sft_matches_hand_computation():
    log_probs, mask = torch.tensor([[-1.0, -2, NAN], [-6, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss, metrics = sft_loss(log_probs, mask, 3)
    assert_close(loss, torch.tensor(3.0))
    assert metrics["gpt_loss"].value == 3


@given(batches_with_split(1))
def test_sft_splitting_changes_neither_value_nor_gradient(case):
    batch, parts = case
    tokens = batch.mask.sum()
    assert_split_adds_up(lambda part, leaf: sft_loss(leaf, part.mask, tokens)[0], batch, parts)


def kd(student, teacher, labels, mask, denominator, kd_coef):
    return kd_loss(*kd_terms(student, teacher, labels), mask, denominator, kd_coef)


def test_kd_matches_hand_computation():
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    loss, metrics = kd(student, teacher, torch.tensor([0]), torch.tensor([1]), 1, 0.4)
    assert_close(loss, torch.tensor(math.log(2)))  # a uniform student: both terms are log 2
    sharp = kd(teacher, teacher, torch.tensor([0]), torch.tensor([1]), 1, 0.4)[1]
    assert sharp["gpt_loss"].value.item() == pytest.approx(-math.log(0.75))
    assert sharp["distil_loss"].value.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert metrics["gpt_loss"].count == 1


def test_kd_covers_exactly_the_positions_of_the_cross_entropy():
    student, teacher = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    labels, mask = torch.randint(0, 5, (2, 4)), torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    loss, gradient = with_gradient(lambda leaf: kd(leaf, teacher, labels, mask, 4, 0.4)[0], student)
    kept = mask.bool()
    cross_entropy = F.cross_entropy(student[kept], labels[kept])
    distillation = F.cross_entropy(student[kept], teacher[kept].softmax(-1))
    assert_close(loss, 0.6 * cross_entropy + 0.4 * distillation)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[kept] != 0).all()


def test_infinite_student_logits_contribute_nothing_to_kd():
    student, teacher = torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([[0.0, 0.0, 0.0]])
    loss, gradient = with_gradient(
        lambda leaf: kd(leaf, teacher, torch.tensor([0]), torch.tensor([1]), 1, 1.0)[0], student
    )
    assert_close(loss, torch.tensor(2 / 3 * math.log(2)))
    assert gradient.isfinite().all()


def test_kd_splitting_changes_nothing():
    student, teacher, labels = torch.randn(6, 3), torch.randn(6, 3), torch.randint(0, 3, (6,))
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    whole = kd(student, teacher, labels, mask, 5, 0.4)[0]
    parts = zip(*(tensor.split([1, 3, 2]) for tensor in (student, teacher, labels, mask)), strict=True)
    assert_close(sum(kd(*part, 5, 0.4)[0] for part in parts), whole)


def test_prm_over_the_whole_vocabulary():
    logits, labels = torch.randn(3, 7), torch.tensor([2, 6, -100])
    loss, _ = prm_loss(logits, labels, labels >= 0, 2)
    assert_close(loss, F.cross_entropy(logits[:2], labels[:2]))


def test_prm_over_the_reward_tokens_alone():
    logits = torch.tensor([[9.0, 1, 0, 2], [9, 0, 0, 1], [9, 5, 0, 0]])
    labels = torch.tensor([3, 1, 0])
    loss, metrics = prm_loss(logits, labels, torch.tensor([1, 1, 0]), 2, reward_token_ids=[3, 1])
    expected = (-math.log(1 / (1 + math.exp(-1))) - math.log(1 / (1 + math.exp(1)))) / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics["acc"].value == 0.5


def test_prm_soft_labels():
    logits = torch.tensor([[9.0, 0.0, math.log(3.0)], [NAN, NAN, NAN]])
    loss, metrics = prm_loss(logits, torch.tensor([0.9, NAN]), torch.tensor([1, 0]), 1, reward_token_ids=[2, 1])
    assert loss.item() == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25))
    assert metrics["acc"].value == 1


def test_prm_soft_labels_need_two_reward_tokens():
    with pytest.raises(ValueError, match="exactly 2 reward tokens"):
        prm_loss(torch.ones(1, 3), torch.tensor([0.5]), torch.ones(1), 1)


def test_prm_error_names_a_label_that_is_not_a_reward_token():
    with pytest.raises(ValueError, match=r"\[2\] are not reward tokens: expected \[0, 1\]"):
        prm_loss(torch.ones(1, 3), torch.tensor([2]), torch.ones(1), 1, [0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[100.0, -100], [-100, 100]], dtype=dtype)
    labels, mask = torch.tensor([1, 1]), torch.ones(2)
    for function in (
        lambda leaf: kd(leaf, -logits, labels, mask, 2, 0.5)[0],
        lambda leaf: prm_loss(leaf, labels, mask, 2, [0, 1])[0],
        lambda leaf: prm_loss(leaf, labels / 2, mask, 2, [0, 1])[0],
    ):
        loss, gradient = with_gradient(function, logits)
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert gradient.isfinite().all()
