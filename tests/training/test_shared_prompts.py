"""Prompts computed once: no objective's loss, metrics or gradients change."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.config.sections.objectives import DirectPreferenceFlags, PairwiseRewardFlags, UnpairedPreferenceFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout, collate
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import Network
from openrlhf.rl.experience import Experience
from openrlhf.rl.samples import Batching, RolloutTokens
from openrlhf.training.backend import values_of
from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.objectives import DirectPreference, PairwiseReward, Step, UnpairedPreference
from openrlhf.training.order import micro_batches
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import LabelledRow, PairRow, Prompt, TokenRow
from tests.samples import make_trajectory
from tests.tiny import make_model

CPU = torch.device("cpu")
PROMPT, VOCABULARY = 20, 80
LAYOUT = Layout(packing=True, pad_id=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def make_network(folder, *, scalar):
    torch.manual_seed(0)  # for the scalar head
    if scalar:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, attn_implementation=SEGMENTED)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=SEGMENTED)
    return Network(model)


def make_rows(prompts=2, samples=4):
    """The samples of each prompt, with responses of different lengths."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        prompt = random.integers(2, VOCABULARY, PROMPT)
        for _ in range(samples):
            ids = np.concatenate([prompt, random.integers(2, VOCABULARY, random.integers(1, 9))]).astype(np.int32)
            rows.append(TokenRow(ids, np.arange(len(ids)) >= PROMPT))
    return rows


def pairs():
    rows = make_rows(3, 2)
    return [PairRow(chosen, rejected, margin=0.1) for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)]


def labelled():
    return [LabelledRow(row, PROMPT, bool(number % 3)) for number, row in enumerate(make_rows())]


def rollout_batches():
    """The micro-batches of a rollout with all that the policy and value objectives need."""
    random = np.random.default_rng(1)
    rows = make_rows()
    sampled = [random.normal(-2.0, 0.3, len(row.input_ids)) for row in rows]
    pairs = zip(rows, sampled, strict=True)
    items = [make_trajectory(Prompt(0, "", ()), row.input_ids, row.target_mask, own) for row, own in pairs]
    names = ("advantages", "returns", "old_values", "old_log_probs", "reference_log_probs")
    tokens = RolloutTokens(items, LAYOUT)
    given = {
        name: torch.tensor(random.normal(-2.0, 0.3, len(tokens.action_mask)), dtype=torch.float32) for name in names
    }
    experience = Experience(trajectories=items, tokens=tokens, metrics={}, kl=None, **given)
    return experience.micro_batches(range(len(items)), Batching(LAYOUT, 4, sharing_limit=1000))


def supervised_batches(objective, rows, backend):
    batches = [collate(part, packing=True, pad_id=1) for part in micro_batches(rows, 3)]
    return objective.prepare(batches, Step(rows, range(len(rows)), 3), backend)


def run_step(name, folder, *, shares):
    backend = LocalBackend(
        make_network(folder, scalar=name in ("value", "rm")), OptimizerFlags(), CPU, learning_rate=0.0
    )
    reference = LocalFrozen(make_network(folder, scalar=False), CPU)
    assert backend.network.shares_prefixes
    assert reference.network.shares_prefixes
    backend.network.shares_prefixes = reference.network.shares_prefixes = shares
    match name:
        case "policy":
            settings = PolicyLossFlags()
            objective, batches = PolicyObjective(settings, kl_coef=0.3, entropy_coef=0.1), rollout_batches()
        case "value":
            objective, batches = ValueObjective(0.5), rollout_batches()
        case "rm":
            objective = PairwiseReward(PairwiseRewardFlags())
            batches = supervised_batches(objective, pairs(), backend)
        case "dpo":
            objective = DirectPreference(DirectPreferenceFlags(), reference)
            batches = supervised_batches(objective, pairs(), backend)
        case "kto":
            objective = UnpairedPreference(UnpairedPreferenceFlags(), reference, LAYOUT, max_len=64)
            batches = supervised_batches(objective, labelled(), backend)
    assert all(batch.prefixes is not None for batch in batches)
    result = backend.forward_backward(batches, objective)
    gradients = {name: weight.grad for name, weight in backend.network.named_parameters()}
    return result.losses, values_of(result.metrics), gradients


@pytest.mark.parametrize("name", ["policy", "value", "rm", "dpo", "kto"])
def test_losses_metrics_and_gradients_do_not_change(name, folder):
    losses, metrics, gradients = run_step(name, folder, shares=False)
    found, measured, shared = run_step(name, folder, shares=True)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    assert measured == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert any(gradient is not None and gradient.abs().max() > 1e-4 for gradient in gradients.values())
    for weight, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(
                shared[weight], gradient, rtol=1e-4, atol=max(1e-8, 1e-5 * float(gradient.abs().max()))
            )
