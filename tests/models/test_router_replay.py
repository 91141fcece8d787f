"""Recorded experts are used in every layout of a batch, with weights that the router computes itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import LAYOUTS, VOCAB, gradients, make_network, make_rows, per_row
from torch import Tensor
from torch.testing import assert_close

from openrlhf.errors import BackendError, ConfigError
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import LogProbs, Network
from openrlhf.models.load import recompute_activations
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.types import NOT_RECORDED, Batch, TokenRow

FAMILIES = {"mixtral": SEGMENTED, "qwen3_moe": SEGMENTED, "gpt_oss": "eager"}
LAYERS, EXPERTS, K = 2, 4, 2


def make_routed(kind: str, attention: str, **options: object) -> Network:
    network = make_network(kind, attention, **options).eval()
    network.routed = RoutedLayers(network.decoder)
    return network


def random_experts(batch: Batch, *, seed: int = 0) -> Tensor:
    """Two different experts for each token, [rows, tokens, layers, k], the same in every layout; -1 on padding."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(int(batch.lengths.sum()), LAYERS, EXPERTS, generator=generator).topk(K).indices
    found = torch.full((*batch.input_ids.shape, LAYERS, K), NOT_RECORDED, dtype=torch.int16)
    found[batch.sequence_ids >= 0] = chosen.to(torch.int16)
    return found


def own_choices(network: Network, row: TokenRow) -> Tensor:
    """The experts that the routers choose for a sequence, [tokens, layers, k]."""
    assert network.routed is not None
    with network.routed.recording(), torch.no_grad():
        network(LAYOUTS["packed"]([row]), LogProbs)
        return network.routed.chosen()


@pytest.mark.parametrize("kind", FAMILIES)
def test_own_choices_change_nothing_and_others_do(kind: str) -> None:
    network, rows = make_routed(kind, FAMILIES[kind]), make_rows()
    batch = LAYOUTS["packed"](rows)
    chosen = torch.cat([own_choices(network, row) for row in rows])[None]
    assert chosen.shape == (1, batch.input_ids.shape[1], LAYERS, K)
    with torch.no_grad():
        plain = network(batch, LogProbs).log_probs
        replayed = network(replace(batch, routed_experts=chosen), LogProbs).log_probs
        others = network(replace(batch, routed_experts=random_experts(batch)), LogProbs).log_probs
        again = network(batch, LogProbs).log_probs
    assert_close(replayed, plain, rtol=0.0, atol=1e-5)
    assert (others - plain).abs().max() > 0.1
    assert_close(again, plain)


def test_weights_are_those_of_the_router_for_the_recorded_experts() -> None:
    """Two layers of Qwen3-MoE: softmax over all experts, and the recorded ones rescaled to a sum of 1."""
    network = make_routed("qwen3_moe", SEGMENTED, norm_topk_prob=True)
    assert network.routed is not None
    block = network.decoder.model.layers[1].mlp
    hidden, chosen = torch.randn(1, 5, 32), torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    network.routed.replay(torch.stack([chosen, chosen], dim=1))
    found = block(hidden)
    probabilities = (hidden[0] @ block.gate.weight.T).softmax(-1).gather(1, chosen)  # [tokens, k]
    weights = probabilities / probabilities.sum(1, keepdim=True)
    assert_close(found[0], block.experts(hidden[0], chosen, weights))
    found.sum().backward()
    assert block.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_layouts_and_recomputation_do_not_change_outputs_or_gradients(kind: str) -> None:
    expected: list[Tensor] = []
    for layout, recomputes in (("padded", False), ("packed", False), ("packed", True)):
        network = make_routed(kind, FAMILIES[kind])
        if recomputes:
            recompute_activations(network.model, reentrant=False)
            network.train()
        batch = LAYOUTS[layout](make_rows())
        outputs = network(replace(batch, routed_experts=random_experts(batch)), LogProbs)
        outputs.log_probs.sum().backward()
        found = [*per_row(outputs.log_probs, batch), *gradients(network).values()]
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_uses_the_experts_of_its_last_sequence() -> None:
    network = make_routed("mixtral", SEGMENTED)
    prompt, first, second = (row.input_ids for row in make_rows((20, 6, 3)))
    rows = [
        TokenRow(np.concatenate([prompt, rest]), np.arange(len(prompt) + len(rest)) >= 20) for rest in (first, second)
    ]
    batch = LAYOUTS["packed"](rows)
    assert batch.prefixes is not None
    experts = random_experts(batch)
    experts[:, :20] = experts[:, 26:46]  # the engine computed the prompt once
    batch = replace(batch, routed_experts=experts)
    with torch.no_grad():
        apart = network(batch, LogProbs).log_probs
        network.shares_prefixes = True
        assert_close(network(batch, LogProbs).log_probs, apart, rtol=0.0, atol=1e-5)


def test_tokens_without_a_record_are_routed_as_usual() -> None:
    network, rows = make_routed("qwen3_moe", SEGMENTED), make_rows()
    batch = LAYOUTS["packed"](rows)
    for number in (NOT_RECORDED, 0):  # engines may report the same expert k times for tokens that they did not record
        experts = torch.full((*batch.input_ids.shape, LAYERS, K), number, dtype=torch.int16)
        with torch.no_grad():
            found = network(replace(batch, routed_experts=experts), LogProbs).log_probs
            assert_close(found, network(batch, LogProbs).log_probs)


def test_records_may_count_layers_without_experts() -> None:
    """vLLM reports a row for every decoder layer; the first layer here has no experts."""
    network = make_routed("qwen3_moe", SEGMENTED, mlp_only_layers=[0])
    batch = LAYOUTS["packed"](make_rows())
    experts = random_experts(batch)
    with torch.no_grad():
        every_layer = network(replace(batch, routed_experts=experts), LogProbs).log_probs
        only_its_own = network(replace(batch, routed_experts=experts[:, :, 1:]), LogProbs).log_probs
    assert_close(every_layer, only_its_own)
    with pytest.raises(BackendError, match="experts of 3 layers: expected 1"):
        network(replace(batch, routed_experts=torch.cat([experts, experts[:, :, 1:]], dim=2)), LogProbs)


def test_other_records_and_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--router_replay: LlamaForCausalLM has no experts"):
        RoutedLayers(make_network("llama", SEGMENTED).decoder)
    network = make_routed("mixtral", SEGMENTED)
    batch = LAYOUTS["packed"](make_rows())
    assert int(batch.input_ids.max()) < VOCAB
    with pytest.raises(BackendError, match="recorded experts of layer 0: expected"):
        network(replace(batch, routed_experts=random_experts(batch)[..., :1]), LogProbs)
    for number in (200, -2):
        experts = random_experts(batch)
        experts[0, 0, 0, 0] = number
        with pytest.raises(BackendError, match=f"the engine reported expert {number}: expected numbers below"):
            network(replace(batch, routed_experts=experts), LogProbs)
