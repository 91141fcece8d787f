"""The audit of the first steps: it finds parameters that do not learn, and accepts networks that do."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import BackendError
from openrlhf.models.forward import Network, Scores, Values
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model, recompute_activations
from openrlhf.training.audit import STEPS, Audit, num_values, report_trained
from openrlhf.training.local import LocalBackend
from tests.tiny import CONFIGS, make_model
from tests.training.deepspeed_cases import Sft, make_batch

CPU = torch.device("cpu")
BATCH = [make_batch((5, 7), 0, packed=False)]


class Scalars(Sft):
    """Train the scalar head, at the last token or at every one."""

    def __init__(self, kind=Scores):
        self.kind = kind

    def loss(self, run, batch, totals):
        outputs = run(batch, self.kind)
        found = outputs.scores if self.kind is Scores else outputs.values
        return (found - 1.0).square().sum() / totals.micro_batches, {}


class NoLoss(Sft):
    def loss(self, run, batch, totals):
        loss, metrics = super().loss(run, batch, totals)
        return loss * 0.0, metrics


def make_network(folder, kind="llama", lora=0, targets=("all-linear",), **shape):
    name = make_model(folder, kind, initializer_range=0.1, **shape)
    model = load_causal_lm(name, ModelFlags(), device=CPU, packing=False)
    torch.manual_seed(0)
    return Network(add_adapters(model, LoraFlags(lora_rank=lora, target_modules=targets), scalar=False))


def train(network, objective=None, scales=(1.0,) * STEPS, rate=1e-3):
    backend = LocalBackend(network, OptimizerFlags(), CPU, learning_rate=rate)
    for scale in scales:
        backend.forward_backward(BATCH, objective or Sft())
        backend.optim_step(scale)
    return backend


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("openrlhf:")]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_learns_is_not_reported(tmp_path, kind, tied, capsys):
    backend = train(make_network(tmp_path, kind, tie_word_embeddings=tied))
    assert lines(capsys) == []
    assert backend.audit.hooks == []
    assert all(not parameter._backward_hooks for parameter in backend.network.parameters())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_adapters_start_with_zero_gradients_and_then_learn(tmp_path, kind, capsys):
    backend = train(make_network(tmp_path, kind, lora=4))
    assert backend.audit.ever.all()
    assert lines(capsys) == []


@pytest.mark.parametrize("kind", [Scores, Values])
@pytest.mark.parametrize("lora", [0, 4])
def test_reward_models_and_critics_use_all_trained_parameters(tmp_path, kind, lora, capsys):
    name = make_model(tmp_path)
    model = load_scalar_model(name, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)
    train(Network(add_adapters(model, LoraFlags(lora_rank=lora), scalar=True)), Scalars(kind))
    assert lines(capsys) == []


def test_a_parameter_without_a_gradient_stops_the_run_and_is_named(tmp_path):
    network = make_network(tmp_path)
    network.decoder.model.layers[1].extra = nn.Linear(3, 3)
    backend = train(network, scales=[1.0] * (STEPS - 1))
    backend.forward_backward(BATCH, Sft())
    with pytest.raises(BackendError, match=r"2 of 23 trainable parameters \(model.layers.1.extra.weight, "):
        backend.optim_step(1.0)


def test_recomputation_that_cuts_the_graph_is_detected(tmp_path):
    """Reentrant recomputation needs inputs with gradients; with frozen embeddings the layers learn nothing."""
    network = make_network(tmp_path)
    network.decoder.get_input_embeddings().requires_grad_(False)
    recompute_activations(network.model, reentrant=True)
    network.decoder.get_input_embeddings()._forward_hooks.clear()
    with pytest.raises(BackendError, match="received no gradient"):
        train(network)


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        (0, r"training all [\d.]+k parameters of the policy"),
        (4, r"training [\d.]+k of [\d.]+k parameters \([\d.]+%\) of"),
    ],
)
def test_the_number_of_trained_parameters_is_reported(tmp_path, lora, line, capsys):
    report_trained(make_network(tmp_path, lora=lora), "policy")
    assert re.search(line, capsys.readouterr().err)


def test_packed_and_sharded_parameters_count_in_full():
    packed, sharded = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(0))
    packed.quant_state = SimpleNamespace(shape=torch.Size([4, 4]))
    sharded.ds_numel = 100
    assert [num_values(parameter) for parameter in (packed, sharded)] == [16, 100]


def test_steps_without_a_signal_are_not_audited(capsys):
    """In RL, equal rewards give gradients of zero, which says nothing about the parameters."""
    weight = nn.Parameter(torch.ones(4))
    audit = Audit([("weight", weight)], lambda parameter: weight, lambda found: found)
    for has_signal in (False, False, False, True, True, True):
        (weight.sum() * float(has_signal)).backward()
        audit.begin(1e-3, has_signal=has_signal)
        with torch.no_grad():
            weight.sub_(1e-3 * float(has_signal))
        audit.end()
    assert audit.hooks == []
    assert lines(capsys) == []


def test_frozen_parameters_need_no_gradient(tmp_path, capsys):
    network = make_network(tmp_path)
    network.decoder.model.layers[0].requires_grad_(False)
    train(network)
    assert lines(capsys) == []


def test_one_expert_that_no_token_reached_is_only_reported(tmp_path, capsys):
    network = make_network(tmp_path)
    network.decoder.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(3, 3, bias=False)])
    train(network)
    (line,) = lines(capsys)
    assert "1 of 22 trainable parameters (model.layers.0.mlp.experts.0.weight) had gradients of exactly zero" in line


def test_steps_without_a_learning_rate_do_not_count(tmp_path):
    backend = train(make_network(tmp_path), scales=(0.0, 1.0, 0.0, 1.0))
    assert backend.audit.steps == 2
    assert backend.audit.hooks


def test_gradients_of_zero_are_reported_in_one_line(tmp_path, capsys):
    train(make_network(tmp_path), NoLoss())
    (line,) = lines(capsys)
    assert "21 of 21 trainable parameters" in line
    assert "exactly zero in the first 3 steps" in line


def test_masters_that_cannot_move_are_reported(tmp_path, capsys):
    train(make_network(tmp_path), rate=1e-30)
    (line,) = lines(capsys)
    assert "their fp32 weights did not change" in line


def test_half_precision_weights_are_judged_by_their_masters(capsys):
    """The learning rate is too small for bf16. A bare parameter is used because this CPU multiplies in fp32."""
    weight, master = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))
    audit = Audit([("weight", weight)], lambda parameter: master, lambda found: found)
    for _ in range(STEPS):
        weight.float().sum().backward()
        audit.begin(1e-6)
        with torch.no_grad():
            master.sub_(1e-6)
            weight.copy_(master)
        audit.end()
    assert (weight == 1.0).all()
    assert audit.hooks == []
    assert lines(capsys) == []


def test_gradients_on_another_rank_count(capsys):
    """A rank with only fillers sees no gradients; the maximum over ranks decides."""
    weight = nn.Parameter(torch.ones(4))
    audit = Audit([("weight", weight)], lambda parameter: None, lambda found: torch.ones_like(found))
    for _ in range(STEPS):
        audit.begin(1.0)
        audit.end()
    assert audit.hooks == []
    assert lines(capsys) == []


def test_a_skipped_step_does_not_count():
    weight = nn.Parameter(torch.ones(4))
    audit = Audit([("weight", weight)], lambda parameter: weight, lambda found: found)
    audit.begin(1.0)
    audit.end(moved=False)
    assert audit.steps == 0
