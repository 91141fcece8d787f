"""Prefixes computed once: outputs and gradients equal those of every sequence with its own copy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import LAYOUTS, VOCAB, make_network
from torch.testing import assert_close

from openrlhf.models import shared_prefix_attention
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import LogProbs, LogProbsAndEntropy, Scores, TargetLogits, Values, share_alike
from openrlhf.models.self_test import choose_layout
from openrlhf.types import TokenRow

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "granite", "mixtral")


def make_rows():
    """Rows of two shared prompts and one separate prompt; prompt tokens are targets as well."""
    random = np.random.default_rng(0)
    one, other, own = (random.integers(1, VOCAB, length) for length in (20, 30, 25))
    parts = ((one, 5), (other, 9), (one, 1), (other, 4), (one, 8), (own, 3))
    rows = [np.concatenate([prompt, random.integers(1, VOCAB, count)]).astype(np.int32) for prompt, count in parts]
    return [TokenRow(ids, np.arange(len(ids)) >= 15) for ids in rows]


def outputs_and_gradients(network, batch, kind):
    outputs = network(batch, kind)
    name = next(name for name in ("log_probs", "scores", "values", "logits") if hasattr(outputs, name))
    found = getattr(outputs, name)
    weights = torch.linspace(0.5, 1.5, found.numel()).view_as(found)  # a different gradient for each output
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return found, torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, LogProbs) for family in FAMILIES),
        *(("llama", kind) for kind in (LogProbsAndEntropy, TargetLogits, Scores, Values)),
    ],
)
def test_outputs_and_gradients_do_not_change(family, kind, layout):
    batch = LAYOUTS[layout](make_rows())
    assert len(batch.prefixes.kept) < 0.7 * sum(map(len, (row.input_ids for row in make_rows())))
    network = make_network(family, SEGMENTED, scalar=kind in (Scores, Values)).eval()
    expected, gradients = outputs_and_gradients(network, batch, kind)
    network.shares_prefixes = True
    lengths = []
    network.decoder_without_head.register_forward_pre_hook(
        lambda *call: lengths.append(call[2]["input_ids"].shape), with_kwargs=True
    )
    found, shared = outputs_and_gradients(network, batch, kind)
    assert lengths == [(1, len(batch.prefixes.kept))]
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for own, other in zip(gradients, shared, strict=True):
        if own is not None:
            assert_close(other, own, rtol=1e-4, atol=1e-5 * float(own.abs().max()))


def test_a_window_shorter_than_a_sequence_rules_sharing_out():
    batch = LAYOUTS["packed"](make_rows())
    network = make_network("mistral", SEGMENTED, sliding_window=8).eval()
    expected = network(replace(batch, prefixes=None), LogProbs).log_probs
    network.shares_prefixes = True
    assert_close(network(batch, LogProbs).log_probs, expected, rtol=0, atol=0)


@torch.no_grad()
def settled(network):
    choose_layout(network.eval(), network)
    return network.shares_prefixes


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])  # its config names a dropout
def test_the_self_test_turns_sharing_on(family):
    assert settled(make_network(family, SEGMENTED))


@pytest.mark.parametrize("scalar", [False, True])
def test_the_self_test_notices_a_continuation_that_misses_its_prefix(scalar, monkeypatch):
    network = make_network("llama", SEGMENTED, scalar=scalar)
    whole = shared_prefix_attention.shared_prefix_attention

    def cut_off(query, key, value, prefixes, scale):
        none = torch.zeros_like(prefixes.continuation_bounds)
        return whole(query, key, value, replace(prefixes, continuation_bounds=none), scale)

    monkeypatch.setattr("openrlhf.models.attention.shared_prefix_attention", cut_off)
    assert not settled(network)


def test_the_self_test_notices_a_prefix_that_gets_no_gradient(monkeypatch):
    whole = shared_prefix_attention.shared_prefix_attention

    def cut_off(query, key, value, prefixes, scale):
        first = prefixes.num_prefix_tokens
        parts = (torch.cat([part[:first].detach(), part[first:]]) for part in (key, value))
        return whole(query, *parts, prefixes, scale)

    monkeypatch.setattr("openrlhf.models.attention.shared_prefix_attention", cut_off)
    assert not settled(make_network("llama", SEGMENTED))


def test_dropout_rules_sharing_out_for_sharded_weights_too():
    network = make_network("llama", SEGMENTED, attention_dropout=0.1)
    for parameter in network.parameters():
        parameter.ds_id = 0  # the mark of ZeRO-3
    assert not settled(network)


def test_compared_networks_share_prefixes_only_together():
    policy, reference = (make_network("llama", SEGMENTED) for _ in range(2))
    policy.shares_prefixes = reference.shares_prefixes = True
    share_alike([policy, reference])
    assert policy.shares_prefixes
    policy.shares_prefixes = False
    share_alike([policy, reference])
    assert not reference.shares_prefixes


@pytest.mark.parametrize(
    ("family", "options"), [("mixtral", {"with_aux_loss": True}), ("llama", {"attention_dropout": 0.1})]
)
def test_load_balancing_and_dropout_rule_sharing_out(family, options):
    assert not settled(make_network(family, SEGMENTED, **options))


def test_padded_models_do_not_share():
    assert not settled(make_network("llama", "sdpa"))
