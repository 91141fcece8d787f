"""Policy and value objectives in the local backend: neither micro-batches nor packing change a step."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout
from openrlhf.models.forward import LogProbs, Network
from openrlhf.rl.experience import Experience
from openrlhf.rl.samples import Batching, RolloutTokens
from openrlhf.training.backend import values_of
from openrlhf.training.local import LocalBackend
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import Prompt
from tests.samples import make_trajectory
from tests.tiny import make_model

CPU = torch.device("cpu")
POLICY = PolicyObjective(PolicyLossFlags(), temperature=0.8)
OBJECTIVES = {
    "token-mean": POLICY,
    "seq-mean": replace(POLICY, settings=PolicyLossFlags(loss_agg_mode="seq-mean")),
    "constant": replace(POLICY, settings=PolicyLossFlags(loss_agg_mode="constant"), constant_length=12),
    "gspo": replace(POLICY, settings=PolicyLossFlags(policy_loss_type="gspo")),
    "kl": replace(POLICY, kl_coef=0.3, kl_estimator="k3"),
    "unbiased kl": replace(POLICY, kl_coef=0.3, kl_unbiased_gradient=True),
    "entropy": replace(POLICY, entropy_coef=0.1),
    "correction": replace(POLICY, settings=PolicyLossFlags(enable_vllm_is_correction=True)),
    "value": ValueObjective(0.5),
}


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    scalar = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return {"policy": Network(AutoModelForCausalLM.from_pretrained(folder)), "value": Network(scalar)}


@pytest.fixture(scope="module")
def samples():
    """Seven samples of uneven length; the third has environment tokens between its turns."""
    rng = np.random.default_rng(0)
    items, arrays = [], []
    for length in (9, 4, 12, 3, 7, 5, 10):
        mask = np.arange(length) >= 2
        if length == 12:
            mask[5:8] = False
        ids = tuple(rng.integers(2, 60, length).tolist())
        own = {name: rng.normal(size=length) for name in ("advantages", "returns", "old_values")}
        for name in ("old_log_probs", "reference_log_probs", "rollout_log_probs"):
            own[name] = -4.4 + 0.3 * rng.normal(size=length)
        items.append(make_trajectory(Prompt(0, "", ids[:2]), ids, mask, own.pop("rollout_log_probs")))
        arrays.append(own)
    tokens = RolloutTokens(items, WHOLE.layout)
    tensors = {
        name: torch.tensor(np.concatenate([own[name] for own in arrays]), dtype=torch.float32) for name in arrays[0]
    }
    return Experience(trajectories=items, tokens=tokens, metrics={}, kl=None, **tensors)


def run_step(networks, objective, samples, batching):
    """Run one step; return its loss, metrics and gradients."""
    kind = "value" if isinstance(objective, ValueObjective) else "policy"
    backend = LocalBackend(deepcopy(networks[kind]), OptimizerFlags(), CPU, learning_rate=0.0)
    laid_out = replace(samples, tokens=replace(samples.tokens, layout=batching.layout))
    batches = laid_out.micro_batches(range(len(samples.trajectories)), batching)
    result = backend.forward_backward(batches, objective)
    gradients = {name: weight.grad for name, weight in backend.network.named_parameters()}
    return float(result.losses.sum()), values_of(result.metrics), gradients


WHOLE = Batching(Layout(packing=False, pad_id=1), 100)
CUTS = {
    "one by one": Batching(Layout(packing=False, pad_id=1), 1),
    "by three": Batching(Layout(packing=False, pad_id=1), 3),
    "packed": Batching(Layout(packing=True, pad_id=1), 100),
    "by tokens": Batching(Layout(packing=True, pad_id=1), 1, 16),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_splitting_a_step_changes_nothing(name, networks, samples):
    objective = OBJECTIVES[name]
    loss, metrics, gradients = run_step(networks, objective, samples, WHOLE)
    assert any(gradient.abs().max() > 1e-5 for gradient in gradients.values() if gradient is not None)
    for batching in CUTS.values():
        other, measured, found = run_step(networks, objective, samples, batching)
        assert other == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert measured == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        for weight, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(found[weight], gradient, rtol=1e-3, atol=1e-6)


def test_the_loss_equals_the_formula(networks, samples):
    (batch,) = samples.micro_batches(range(7), WHOLE)
    mask = batch.target_mask
    with torch.no_grad():
        log_probs = networks["policy"].eval()(batch, LogProbs, temperature=0.8).log_probs
    ratio = (log_probs - batch.old_log_probs).exp()
    each = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages) * mask
    drift = (log_probs - batch.reference_log_probs) * mask
    lengths = mask.sum(1)
    wanted = {
        "token-mean": each.sum() / mask.sum(),
        "seq-mean": (each.sum(1) / lengths).mean(),
        "constant": each.sum() / (12 * 7),
        "kl": (each + 0.3 * (torch.expm1(-drift) + drift)).sum() / mask.sum(),
    }
    for name, value in wanted.items():
        loss, metrics, _ = run_step(networks, OBJECTIVES[name], samples, WHOLE)
        assert loss == pytest.approx(float(value), rel=1e-4), name
        if name != "kl":
            assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-5)


def test_without_old_log_probs_the_ratio_is_one(networks, samples):
    bare = replace(samples, old_log_probs=None)
    loss, metrics, _ = run_step(networks, POLICY, bare, WHOLE)
    (batch,) = bare.micro_batches(range(7), WHOLE)
    assert loss == pytest.approx(-float(batch.advantages[batch.target_mask].mean()), rel=1e-5)
    assert metrics["ppo_clip_ratio"] == 0.0
    assert metrics["ppo_kl"] == 0.0


def test_an_entropy_weight_of_zero_only_logs_entropy(networks, samples):
    loss, metrics, _ = run_step(networks, replace(POLICY, entropy_coef=0.0), samples, WHOLE)
    assert loss == pytest.approx(run_step(networks, POLICY, samples, WHOLE)[0], rel=1e-5)
    assert metrics["entropy"] > 0
