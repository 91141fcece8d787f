import itertools

import pytest
import torch
from networks import (
    ATTENTIONS,
    LAYOUTS,
    alone,
    changed,
    gradients,
    make_network,
    make_plain,
    make_rows,
    per_row,
    plain_log_probs,
)
from torch.testing import assert_close

from openrlhf.algo.expert_balance import balance_loss
from openrlhf.config.sections.model import ModelFlags
from openrlhf.data.collate import pack, pad
from openrlhf.errors import ConfigError
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import (
    DistillationTerms,
    HiddenStates,
    LogProbs,
    LogProbsAndEntropy,
    Scores,
    TargetLogits,
    Teacher,
    Values,
)
from openrlhf.models.load import recompute_activations
from openrlhf.training.preflight import balances_experts
from openrlhf.types import Batch
from tests.tiny import CONFIGS

CAPPED = "gemma2"  # caps its attention scores, so our attention rejects it (tested below)
UNABLE = {(CAPPED, SEGMENTED), ("gpt_oss", "sdpa"), ("gpt_oss", SEGMENTED)}  # GPT-OSS has attention sinks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "attention"),
    [pair for pair in itertools.product(CONFIGS, ATTENTIONS) if pair not in UNABLE],
)
def test_log_probs_are_those_of_the_plain_model(kind, attention, layout):
    rows = make_rows()
    batch = LAYOUTS[layout](rows)
    with torch.no_grad():
        plain = make_plain(kind)
        got = make_network(kind, attention)(batch, LogProbs).log_probs
        for row, log_probs in zip(rows, per_row(got, batch), strict=True):
            expected = torch.where(torch.from_numpy(row.target_mask[1:]), plain_log_probs(plain, row), 0.0)
            assert_close(log_probs[1:], expected, rtol=1e-5, atol=1e-5)
            assert log_probs[0] == 0


def test_capped_attention_is_rejected_if_it_cannot_be_computed():
    network = make_network(CAPPED, SEGMENTED)
    with pytest.raises(ConfigError, match=r"attention score caps.*Try: --attn_implementation eager"):
        network(pack(make_rows()), LogProbs)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    row = make_rows()[0]
    network = make_network("llama", "sdpa")
    got = network(pack([row]), LogProbs, temperature=temperature).log_probs
    assert_close(got[0, 2:], plain_log_probs(network.model, row, temperature)[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "gpt2"])
def test_rows_do_not_affect_each_other(kind, attention, layout):
    network = make_network(kind, attention)
    rows = make_rows()
    seen = []
    for second in (rows[1], changed(rows[1])):
        batch = LAYOUTS[layout]([rows[0], second, rows[2]])
        log_probs = per_row(network(batch, LogProbs).log_probs, batch)
        kept = torch.cat([log_probs[0], log_probs[2]])
        kept.sum().backward()
        seen.append((kept.detach(), log_probs[1].detach(), gradients(network)))
    (before, own_before, gradient_before), (after, own_after, gradient_after) = seen
    assert (own_before - own_after).abs().max() > 0.1  # the change is large enough to detect
    assert_close(after, before, rtol=0, atol=1e-6)
    assert_close(gradient_after, gradient_before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_packing_equals_padding_in_values_and_gradients(kind, attention):
    network = make_network(kind, attention)
    rows = make_rows()
    weights = [torch.linspace(-1, 1, len(row.input_ids)) for row in rows]
    results = []
    for lay in LAYOUTS.values():
        batch = lay(rows)
        outputs = network(batch, LogProbsAndEntropy)
        log_probs = torch.cat(per_row(outputs.log_probs, batch))
        entropy = torch.cat(per_row(outputs.entropy, batch))
        ((log_probs + 0.1 * entropy) * torch.cat(weights)).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), gradients(network)))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_taken_at_the_last_token_and_values_before_each(attention, layout):
    network = make_network("llama", attention, scalar=True)
    rows = make_rows()
    batch = LAYOUTS[layout](rows)
    scores, values = network(batch, Scores).scores, network(batch, Values).values
    plain = make_plain("llama", scalar=True)
    for row, score, value in zip(rows, scores, per_row(values, batch), strict=True):
        scalar = plain.score(plain.model(input_ids=alone(row)).last_hidden_state[0]).squeeze(-1)  # [tokens]
        assert_close(score, scalar[-1], rtol=1e-5, atol=1e-5)
        assert_close(value[2:], scalar[1:-1], rtol=1e-5, atol=1e-5)
        assert (value[:2] == 0).all()  # the prompt


@pytest.mark.parametrize("layout", LAYOUTS)
def test_target_logits_are_taken_at_the_targets_themselves(layout):
    network = make_network("llama", "sdpa")
    rows = make_rows()
    got = network(LAYOUTS[layout](rows), TargetLogits).logits
    plain = [network.model(input_ids=alone(row)).logits[0, 2:] for row in rows]
    assert_close(got, torch.cat(plain), rtol=1e-5, atol=1e-5)


def test_hidden_states_are_those_that_predict_the_targets():
    network = make_network("llama", "sdpa")
    rows = make_rows()
    hidden = network(pad(rows, 0), HiddenStates).hidden
    logits = network.vocabulary_head(hidden)
    targets = torch.cat([alone(row)[0, 2:] for row in rows])
    expected = torch.cat([plain_log_probs(network.model, row)[1:] for row in rows])
    assert_close(logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1), expected, rtol=1e-5, atol=1e-5)


def test_distillation_from_itself_is_the_entropy():
    network = make_network("llama", "sdpa")
    batch = pad(make_rows(), 0)
    teacher = network(batch, HiddenStates).hidden.detach()
    outputs = network(batch, DistillationTerms, teacher=Teacher(teacher, network.vocabulary_head))
    measured = network(batch, LogProbsAndEntropy)
    assert_close(-outputs.cross, measured.entropy)
    assert_close(outputs.log_probs, measured.log_probs)


def test_last_tokens_by_hand():
    for shape, lengths, expected in (((3, 4), [2, 3, 4], [1, 6, 11]), ((1, 6), [2, 3, 1], [1, 4, 5])):
        ids, nothing = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        batch = Batch(input_ids=ids, lengths=torch.tensor(lengths), target_mask=nothing)
        assert batch.places.last.tolist() == expected


@pytest.mark.parametrize("attention", ["sdpa", SEGMENTED])
def test_rows_without_targets_give_zeros_that_have_a_gradient(attention):
    network = make_network("llama", attention)
    batch = pack(make_rows(prompt=100))
    log_probs = network(batch, LogProbs).log_probs
    log_probs.sum().backward()
    assert (log_probs == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(network).values())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_auxiliary_loss_is_the_models_own(kind):
    batch = pad(make_rows(), 0)
    mask = (batch.sequence_ids >= 0).long()
    own = make_plain(kind)(input_ids=batch.input_ids, attention_mask=mask, output_router_logits=True).aux_loss
    for attention in ATTENTIONS:
        for lay in LAYOUTS.values() if (kind, attention) not in UNABLE else ():
            network = make_network(kind, attention, with_aux_loss=True)
            laid = lay(make_rows())
            outputs = network(laid, LogProbs)
            got = balance_loss(outputs.expert_probabilities, outputs.expert_counts, laid.lengths.sum())
            assert_close(got, own)
            got.backward()
            assert any(".gate." in name or ".router." in name for name in gradients(network))
    assert make_network(kind, "eager")(batch, LogProbs).expert_counts is None


def test_balancing_experts_needs_experts():
    balanced = ModelFlags(aux_loss_coef=0.01)
    assert balances_experts(balanced, CONFIGS["mixtral"]())
    assert not balances_experts(ModelFlags(), CONFIGS["llama"]())
    assert not balances_experts(balanced, CONFIGS["llama"]())


def test_balancing_experts_rejects_recomputation_that_hides_their_routers():
    network = make_network("mixtral", SEGMENTED, with_aux_loss=True).train()
    recompute_activations(network.model, reentrant=True)
    with pytest.raises(ConfigError, match="has no gradient with --gradient_checkpointing_use_reentrant"):
        network(pack(make_rows()), LogProbs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("llama", SEGMENTED), ("qwen3_moe", SEGMENTED)])
def test_recomputed_activations_give_the_same_gradients(kind, attention, reentrant):
    results = []
    for recompute in (False, True):
        network = make_network(kind, attention, with_aux_loss=kind == "qwen3_moe" and not reentrant).train()
        if recompute:
            recompute_activations(network.model, reentrant=reentrant)
        outputs = network(pack(make_rows()), LogProbs)
        probabilities = outputs.expert_probabilities
        (outputs.log_probs.sum() + (0 if probabilities is None else probabilities.square().sum())).backward()
        results.append(gradients(network))
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
