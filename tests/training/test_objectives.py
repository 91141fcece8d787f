"""The six objectives in the local backend: their losses, and that micro-batches do not change them."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.algo.reduce import add_metrics
from openrlhf.config.sections.objectives import (
    DirectPreferenceFlags,
    DistillationFlags,
    PairwiseRewardFlags,
    UnpairedPreferenceFlags,
)
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout, collate
from openrlhf.models.forward import Network
from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.objectives import (
    SFT,
    DirectPreference,
    Distillation,
    PairwiseReward,
    ProcessReward,
    Step,
    UnpairedPreference,
)
from openrlhf.training.order import micro_batches
from openrlhf.types import LabelledRow, PairRow, StepRow, TokenRow
from tests.tiny import make_model

assert_close = partial(torch.testing.assert_close, check_dtype=False)  # sums are float64, hand-worked ones are not
CPU = torch.device("cpu")
VOCABULARY = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(folder):
    """A model that differs from its reference."""
    return perturbed(AutoModelForCausalLM.from_pretrained(folder), seed=1)


@pytest.fixture(scope="module")
def reference(folder):
    return LocalFrozen(Network(AutoModelForCausalLM.from_pretrained(folder)), CPU)


@pytest.fixture(scope="module")
def scorer(folder):
    return perturbed(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1), seed=1)


def perturbed(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tokens(rng, prompt=3, response=None):
    """Return a row of random tokens in which the response is learned."""
    length = rng.integers(1, 7) if response is None else response
    ids = rng.integers(2, VOCABULARY, prompt + length).astype(np.int32)
    return TokenRow(ids, np.arange(prompt + length) >= prompt)


def token_rows(count=7, seed=0):
    rng = np.random.default_rng(seed)
    return [tokens(rng) for _ in range(count)]


def pair_rows(count=7, seed=0):
    rng = np.random.default_rng(seed)
    return [PairRow(tokens(rng), tokens(rng), margin=0.1 * index) for index in range(count)]


def labelled_rows(count=7, seed=0):
    rng = np.random.default_rng(seed)
    return [LabelledRow(tokens(rng), 3, bool(index % 3)) for index in range(count)]


def step_rows(count=7, seed=0, *, soft):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = rng.integers(2, VOCABULARY, 9).astype(np.int32)
        places = np.sort(rng.choice(np.arange(1, 9), rng.integers(1, 4), replace=False)).astype(np.int32)
        labels = rng.random(len(places)) if soft else rng.integers(0, 2, len(places))
        rows.append(StepRow(ids, places, labels.astype(np.float32)))
    return rows


def run_step(model, objective, rows, size):
    """Run one step; return its losses and metrics, and the gradients."""
    backend = LocalBackend(Network(deepcopy(model)), OptimizerFlags(), CPU, learning_rate=0.0)
    batches = [collate(part, packing=False, pad_id=1) for part in micro_batches(rows, size)]
    batches = objective.prepare(batches, Step(rows, range(len(rows)), size), backend)
    result = backend.forward_backward(batches, objective)
    gradients = {name: parameter.grad for name, parameter in backend.network.named_parameters()}
    return result, gradients


def direct(reference, **flags):
    return DirectPreference(DirectPreferenceFlags(**flags), reference)


def unpaired(reference):
    flags = UnpairedPreferenceFlags(beta=0.3, desirable_loss_weight=1.5, undesirable_loss_weight=0.5)
    return UnpairedPreference(flags, reference, Layout(packing=False, pad_id=1), max_len=2048)


CASES = {
    "sft": (lambda frozen: SFT(), token_rows()),
    "kd": (lambda frozen: Distillation(DistillationFlags(), frozen), token_rows()),
    "rm": (lambda frozen: PairwiseReward(PairwiseRewardFlags()), pair_rows()),
    "rm with margins": (lambda frozen: PairwiseReward(PairwiseRewardFlags(margin_loss=True)), pair_rows()),
    "rm by logexp": (lambda frozen: PairwiseReward(PairwiseRewardFlags(loss="logexp")), pair_rows()),
    "dpo": (lambda frozen: direct(frozen), pair_rows()),
    "cdpo with nll": (lambda frozen: direct(frozen, label_smoothing=0.1, nll_loss_coef=0.3), pair_rows()),
    "ipo": (lambda frozen: direct(frozen, ipo=True), pair_rows()),
    "ipo by length": (lambda frozen: direct(frozen, ipo=True, ipo_length_average=True), pair_rows()),
    "kto": (unpaired, labelled_rows()),
    "prm": (lambda frozen: ProcessReward((5, 6)), step_rows(soft=False)),
    "prm over all tokens": (lambda frozen: ProcessReward(), step_rows(soft=False)),
    "prm with soft labels": (lambda frozen: ProcessReward((5, 6), soft=True), step_rows(soft=True)),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_splitting_into_micro_batches_changes_nothing(name, size, policy, scorer, reference):
    make, rows = CASES[name]
    model = scorer if name.startswith("rm") else policy
    whole, expected = run_step(model, make(reference), rows, len(rows))
    parts, got = run_step(model, make(reference), rows, size)
    assert len(parts.losses) == math.ceil(len(rows) / size)
    assert_close(parts.losses.sum(), whole.losses.sum(), atol=1e-6, rtol=1e-5)
    assert parts.metrics.keys() == whole.metrics.keys()
    for key, metric in whole.metrics.items():
        assert_close(parts.metrics[key].value, metric.value, atol=1e-6, rtol=1e-5)
    assert sum(gradient.abs().sum() for gradient in expected.values()) > 0.01
    for key, gradient in expected.items():
        assert_close(got[key], gradient, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def response_log_probs(model, row):
    """Return log p of the response's tokens, one row at a time with plain Transformers."""
    ids = torch.from_numpy(row.input_ids).long()[None]
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return log_probs[torch.from_numpy(row.target_mask)[1:]]


def test_sft_is_the_mean_over_all_tokens_of_the_step(policy):
    rows = token_rows()
    expected = -torch.cat([response_log_probs(policy, row) for row in rows]).mean()
    result, _ = run_step(policy, SFT(), rows, 2)
    assert_close(result.losses.sum(), expected)
    assert_close(result.metrics["gpt_loss"].value.float(), expected)


def test_dpo_compares_log_ratios_with_the_reference(policy, reference):
    rows, frozen = pair_rows(), reference.network.decoder
    ratios = [
        [response_log_probs(policy, side).sum() - response_log_probs(frozen, side).sum() for side in sides]
        for sides in ((row.chosen, row.rejected) for row in rows)
    ]
    margins = torch.tensor([chosen - rejected for chosen, rejected in ratios])
    result, _ = run_step(policy, direct(reference), rows, 2)
    assert_close(result.losses.sum(), -torch.nn.functional.logsigmoid(0.1 * margins).mean())
    assert_close(result.metrics["acc"].value, (margins > 0).double().mean())


def test_the_kto_baseline_is_the_mean_over_mismatched_pairs_of_the_step(policy, reference):
    """Each prompt is paired with the next row's response, the last with the first's; prompts have three tokens."""
    rows, frozen = labelled_rows(), reference.network.decoder
    others = [
        TokenRow(np.concatenate([row.tokens.input_ids[:3], other.tokens.input_ids[3:]]), other.tokens.target_mask)
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]

    def ratios(responses):
        return torch.stack(
            [(response_log_probs(policy, row) - response_log_probs(frozen, row)).sum() for row in responses]
        )

    baseline = ratios(others).mean().clamp(min=0)
    signs = torch.tensor([1.0 if row.label else -1.0 for row in rows])
    losses = torch.sigmoid(-signs * 0.3 * (ratios([row.tokens for row in rows]) - baseline))
    weights = torch.where(signs > 0, 1.5, 0.5)
    result, _ = run_step(policy, unpaired(reference), rows, 2)
    assert_close(result.metrics["kl"].value.float(), baseline)
    assert_close(result.losses.sum(), (weights * losses).mean())


def without_a_token(model, token):
    """Return a copy whose head gives one token probability zero."""
    copy = deepcopy(model)
    head = torch.nn.Linear(copy.lm_head.in_features, copy.lm_head.out_features)
    head.weight.data.copy_(copy.lm_head.weight)
    head.bias.data.zero_()[token] = -math.inf
    copy.set_output_embeddings(head)
    return copy


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_a_response_of_probability_zero_in_both_models_gives_finite_losses(name, policy, reference):
    make, rows = CASES[name]
    first = rows[0].chosen if name != "kto" else rows[0].tokens
    token = int(first.input_ids[-1])
    frozen = LocalFrozen(Network(without_a_token(reference.network.decoder, token)), CPU)
    result, gradients = run_step(without_a_token(policy, token), make(frozen), rows, 2)
    assert result.losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_distillation_from_the_student_itself_costs_its_entropy(policy):
    itself = LocalFrozen(Network(deepcopy(policy)), CPU)
    rows = token_rows()
    result, gradients = run_step(policy, Distillation(DistillationFlags(kd_coef=1.0), itself), rows, 3)
    assert result.metrics["distil_loss"].value > 0
    for gradient in gradients.values():  # cross entropy is minimal when both agree
        assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


def test_an_incomplete_micro_batch_counts_by_its_rows(policy):
    """Three rows in micro-batches of two: the last row alone is a third of the step, not a half."""
    rows = [tokens(np.random.default_rng(seed), response=4) for seed in range(3)]
    result, _ = run_step(policy, SFT(), rows, 2)
    alone, _ = run_step(policy, SFT(), rows[2:], 1)
    assert_close(result.losses[1], alone.losses[0] / 3)


def test_the_expert_balance_does_not_depend_on_micro_batches(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(Path(tmp_path), "mixtral"))
    rows = token_rows()
    whole = collate(rows, packing=False, pad_id=1)
    mask = (whole.sequence_ids >= 0).long()
    own = model(input_ids=whole.input_ids, attention_mask=mask, output_router_logits=True).aux_loss
    found = []
    for size in (2, 3, 7):
        backend = LocalBackend(Network(deepcopy(model), with_aux_loss=True), OptimizerFlags(), CPU, learning_rate=0.0)
        batches = [collate(part, packing=False, pad_id=1) for part in micro_batches(rows, size)]
        batches.append(replace(batches[0], filler=True))
        evaluated = backend.evaluate(batches, SFT(0.5))
        trained = backend.forward_backward(batches, SFT(0.5)).metrics
        for metrics in (evaluated, trained):
            assert_close(metrics["aux_loss"].value.float(), own.detach(), atol=1e-5, rtol=1e-5)
        found.append([parameter.grad for parameter in backend.network.parameters()])
    assert len(rows) == 7
    for gradients in zip(*found, strict=True):
        for gradient in gradients[1:]:
            assert_close(gradient, gradients[0], atol=1e-6, rtol=1e-5)


def test_the_expert_balance_of_an_evaluation_does_not_depend_on_micro_batches(tmp_path):
    """The second chunk is smaller than the first."""
    model = AutoModelForCausalLM.from_pretrained(make_model(Path(tmp_path), "mixtral"))
    backend = LocalBackend(Network(model, with_aux_loss=True), OptimizerFlags(), CPU, learning_rate=0.0)
    rows = token_rows()
    found = []
    for size in (1, 2, 5):
        parts = []
        for chunk in (rows[:5], rows[5:]):
            batches = [collate(part, packing=False, pad_id=1) for part in micro_batches(chunk, size)]
            parts.append(backend.evaluate(batches, SFT(0.5)))
        found.append(float(add_metrics(parts)["aux_loss"].value))
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
