"""Optimizers with fp32 masters, Muon, and learning rate schedules."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import get_scheduler

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import BackendError, ConfigError
from openrlhf.training.optim import (
    MasterOptimizer,
    between_steps,
    is_matrix,
    only_warmup,
    parameter_groups,
    schedule,
    trainable,
)

PEAK = 3e-4


class TinyNetwork(nn.Module):
    """A network with the parameter names of Transformers; the last parameter is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(5, 4, dtype=dtype)
        self.q_proj = nn.Linear(4, 4, dtype=dtype)
        self.input_layernorm = nn.LayerNorm(4, dtype=dtype)
        self.frozen = nn.Linear(4, 4, dtype=dtype).requires_grad_(False)

    def backward(self, step: int, scale: float = 1.0) -> None:
        """Set gradients that differ by step and parameter, and are the same for every dtype."""
        random = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            if parameter.requires_grad:
                wanted = scale * torch.randn(parameter.shape, generator=random).to(torch.bfloat16)
                (parameter * wanted.to(parameter.dtype)).sum().backward()


def weights(network):
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def adam(network, decay=0.0, **options):
    """Return the equivalent optimizer of plain PyTorch."""
    learns = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    exempt = ("bias", "norm.weight")
    groups = [
        {"params": [p for name, p in learns if not name.endswith(exempt)], "weight_decay": decay},
        {"params": [p for name, p in learns if name.endswith(exempt)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, **options)


NAMES = ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts"]


@pytest.mark.parametrize("name", [*NAMES, "cosine_warmup_with_min_lr", "inverse_sqrt"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.25])
def test_schedules_equal_transformers(name, warmup_ratio):
    total = 17
    factor = schedule(name, warmup_ratio=warmup_ratio, total_steps=total, min_lr_ratio=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = {0.0: 0, 0.03: 1, 0.25: 5}[warmup_ratio]
    theirs = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs={"min_lr_rate": 0.1} if "min_lr" in name else None,
    )
    for step in range(total):
        assert PEAK * factor(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_the_factor_is_linear_between_two_steps():
    factor = schedule("cosine_warmup_with_min_lr", warmup_ratio=0.25, total_steps=16, min_lr_ratio=0.1)
    for step in range(16):
        assert between_steps(factor, step) == factor(step)
        assert between_steps(factor, step + 0.25) == pytest.approx(0.75 * factor(step) + 0.25 * factor(step + 1))


def test_the_default_schedule_matches_hand_computation():
    factor = schedule("cosine_with_min_lr", warmup_ratio=0.1, total_steps=20, min_lr_ratio=0.1)
    assert [factor(step) for step in (0, 1, 2, 11, 20)] == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1])


def test_impossible_schedules_are_rejected():
    options = {"warmup_ratio": 0.1, "total_steps": 10, "min_lr_ratio": 0.1}
    with pytest.raises(ConfigError, match="--lr_scheduler cosin: ") as caught:
        schedule("cosin", **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="depends on the loss"):
        schedule("reduce_lr_on_plateau", **options)
    with pytest.raises(ConfigError, match=r"decay needs settings that have no flag: .* Try: --lr_scheduler cosine"):
        schedule("warmup_stable_decay", **options)


@pytest.mark.parametrize(
    ("name", "ratio", "steps", "message"),
    [
        ("cosine_with_min_lr", 0.03, 1, "the only optimizer step is warm-up (--lr_warmup_ratio 0.03), with a learning"),
        ("linear", 0.7, 3, "all 3 optimizer steps are warm-up (--lr_warmup_ratio 0.7), the first with a learning"),
        ("cosine_with_min_lr", 0.03, 2, None),
        ("cosine_with_min_lr", 0.0, 1, None),
        ("constant", 0.03, 1, None),
    ],
)
def test_a_run_of_warm_up_only_is_reported(name, ratio, steps, message):
    scheduled = schedule(name, warmup_ratio=ratio, total_steps=steps, min_lr_ratio=0.1)
    line = only_warmup(scheduled, steps=steps, warmup_ratio=ratio)
    assert line is None if message is None else line.startswith(message) and line.endswith("Try: --lr_warmup_ratio 0")


def test_weight_decay_spares_biases_and_norms():
    network = nn.ModuleDict()
    names = {
        "q_proj.weight": True,
        "q_proj.bias": False,
        "layer_norm.weight": False,
        "input_layernorm.weight": False,
        "model.norm.weight": False,
        "q_norm.weight": False,
        "ln_f.weight": False,
        "lm_head.weight": True,
        "embed_tokens.weight": True,
    }
    named = [(name, nn.Parameter(torch.zeros(1))) for name in names]
    decayed, plain = parameter_groups(named, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    expected = {id(parameter): names[name] for name, parameter in named}
    assert all(expected[id(parameter)] for parameter in decayed["params"])
    assert not any(expected[id(parameter)] for parameter in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    assert parameter_groups([], 0.0) == []
    assert trainable(network) == []


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_in_fp32_the_optimizer_equals_adamw(decay):
    network, reference = TinyNetwork(), TinyNetwork()
    optimizer = MasterOptimizer(network, OptimizerFlags(l2=decay, max_norm=0.0), PEAK)
    exact, near = adam(reference, decay, fused=True), adam(other := TinyNetwork(), decay)
    for step in range(5):
        for one in (network, reference, other):
            one.backward(step)
        scale = 1 - step / 10
        optimizer.step(scale)
        for theirs in (exact, near):
            for group in theirs.param_groups:
                group["lr"] = PEAK * scale
            theirs.step()
            theirs.zero_grad()
        assert_close(weights(network), weights(reference), rtol=0, atol=0)
        assert_close(weights(network), weights(other))
    assert torch.equal(network.frozen.weight, TinyNetwork().frozen.weight)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_reported_norm_is_before_clipping():
    network, free = TinyNetwork(), TinyNetwork()
    clipped = MasterOptimizer(network, OptimizerFlags(max_norm=0.5), PEAK)
    unclipped = MasterOptimizer(free, OptimizerFlags(max_norm=0.0), PEAK)
    for one in (network, free):
        one.backward(0)
    norm = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm().item()
    assert norm > 0.5
    assert clipped.step(1.0) == pytest.approx(norm)
    assert unclipped.step(1.0) == pytest.approx(norm)
    moments = [
        torch.cat([slots["exp_avg"].flatten() for slots in optimizer.optimizers[0].state.values()])
        for optimizer in (clipped, unclipped)
    ]
    assert_close(moments[0], moments[1] * 0.5 / norm)


@pytest.mark.parametrize("offload", [False, True])
def test_half_precision_follows_full_precision_masters(offload):
    network, reference = TinyNetwork(torch.bfloat16), TinyNetwork()
    reference.load_state_dict({name: tensor.float() for name, tensor in weights(network).items()})
    optimizer = MasterOptimizer(network, OptimizerFlags(max_norm=0.0), PEAK, offload=offload)
    theirs = adam(reference, fused=True)
    for step in range(20):
        for micro in range(2):  # two micro-batches, added in fp32
            network.backward(100 * step + micro)
            reference.backward(100 * step + micro)
        optimizer.step(1.0)
        theirs.step()
        theirs.zero_grad()
        learned = {name: p.detach() for name, p in reference.named_parameters() if p.requires_grad}
        assert_close({name: master.detach() for name, master in optimizer.masters.items()}, learned, rtol=0, atol=0)
        shown = {name: tensor.to(torch.bfloat16) for name, tensor in learned.items()}
        assert_close({name: network.get_parameter(name).detach() for name in shown}, shown, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_updates_below_half_precision_are_not_lost():
    network = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        network.weight.fill_(1.0)
    optimizer = MasterOptimizer(network, OptimizerFlags(max_norm=0.0), 1e-4)
    for _ in range(100):  # each moves the weight by 1e-4; bf16 near 1 has steps of 4e-3
        network.weight.sum().backward()
        optimizer.step(1.0)
    assert next(iter(optimizer.masters.values())).item() == pytest.approx(1 - 100 * 1e-4, abs=1e-4)
    assert network.weight.item() == pytest.approx(0.99, abs=0.004)
    assert network.weight.item() < 1


@settings(deadline=None, max_examples=10)
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), optim=st.sampled_from(["adam", "muon"]))
def test_saved_state_resumes_bit_for_bit(dtype, optim):
    flags = OptimizerFlags(optim=optim, l2=0.01, muon_lr=1e-3)
    network = TinyNetwork(dtype)
    optimizer = MasterOptimizer(network, flags, PEAK)
    for step in range(3):
        network.backward(step)
        optimizer.step(1.0)
    saved = copy.deepcopy(optimizer.state())
    other = TinyNetwork(dtype)
    resumed = MasterOptimizer(other, flags, PEAK)
    resumed.load_state(saved)
    assert_close(weights(other), weights(network), rtol=0, atol=0)
    for step in range(3, 6):
        for one, its in ((network, optimizer), (other, resumed)):
            one.backward(step)
            its.step(0.5)
    assert_close(weights(other), weights(network), rtol=0, atol=0)
    assert_close(resumed.state(), optimizer.state(), rtol=0, atol=0)


def test_state_saved_before_the_first_step_is_restored():
    network = TinyNetwork()
    saved = copy.deepcopy(MasterOptimizer(network, OptimizerFlags(), PEAK).state())
    other = TinyNetwork()
    resumed = MasterOptimizer(other, OptimizerFlags(), PEAK)
    resumed.load_state(saved)
    other.backward(0)
    resumed.step(1.0)


def test_state_of_another_network_is_rejected_unchanged():
    saved = MasterOptimizer(TinyNetwork(), OptimizerFlags(), PEAK).state()
    network = TinyNetwork()
    optimizer = MasterOptimizer(network, OptimizerFlags(), PEAK)
    before = weights(network)
    missing = {name: tensor + 1 for name, tensor in saved.items() if "bias" not in name}
    with pytest.raises(BackendError, match=r"q_proj.bias: expected a tensor of shape \[4\], got nothing"):
        optimizer.load_state(missing)
    other = {name: tensor[:3] if name == "weight/embed_tokens.weight" else tensor + 1 for name, tensor in saved.items()}
    with pytest.raises(BackendError, match=r"embed_tokens.weight: expected a tensor of shape \[5, 4\], got \[3, 4\]"):
        optimizer.load_state(other)
    assert_close(weights(network), before, rtol=0, atol=0)


def test_muon_trains_matrices_inside_layers_and_adam_the_rest():
    network, reference = TinyNetwork(), TinyNetwork()
    flags = OptimizerFlags(optim="muon", muon_lr=0.01, max_norm=0.0)
    optimizer = MasterOptimizer(network, flags, PEAK)
    assert [type(one).__name__ for one in optimizer.optimizers] == ["AdamW", "Muon"]
    matrices = [reference.q_proj.weight]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0, momentum=0.95, nesterov=True, ns_steps=5)
    rest = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad and p is not matrices[0]],
        lr=PEAK,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    for step in range(3):
        for one in (network, reference):
            one.backward(step)
        optimizer.step(0.5)
        for theirs, peak in ((muon, 0.01), (rest, PEAK)):
            theirs.param_groups[0]["lr"] = peak / 2
            theirs.step()
            theirs.zero_grad()
    assert_close(weights(network), weights(reference), rtol=0, atol=0)


def test_muon_selects_matrices_inside_layers():
    matrix, vector, experts = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (4, 2, 2)))
    assert is_matrix("model.layers.0.self_attn.q_proj.weight", matrix)
    assert not is_matrix("model.layers.0.input_layernorm.weight", vector)
    assert not is_matrix("model.layers.0.mlp.experts.gate_up_proj", experts)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "score.weight", "transformer.wte.weight"):
        assert not is_matrix(name, matrix)


def test_muon_alone_needs_no_adam():
    network = nn.Linear(64, 32, bias=False)  # smaller matrices crash the half-precision kernels of some CPUs
    optimizer = MasterOptimizer(network, OptimizerFlags(optim="muon", muon_lr=1.0, max_norm=0.0), PEAK)
    assert [type(one).__name__ for one in optimizer.optimizers] == ["Muon"]
    before = network.weight.detach().clone()
    (network.weight * torch.randn(32, 64)).sum().backward()
    optimizer.step(1.0)
    stretches = torch.linalg.svdvals(network.weight.detach() - before)
    assert stretches.min() > 0.5  # the update has about the same size in all directions
    assert stretches.max() < 1.5


def test_a_model_without_trainable_parameters_is_rejected():
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        MasterOptimizer(TinyNetwork().requires_grad_(False), OptimizerFlags(), PEAK)


def test_a_parameter_without_a_gradient_is_unchanged():
    network = TinyNetwork()
    optimizer = MasterOptimizer(network, OptimizerFlags(l2=0.1), PEAK)
    before = weights(network)
    network.q_proj.weight.sum().backward()
    optimizer.step(1.0)
    moved = [name for name, tensor in weights(network).items() if not torch.equal(tensor, before[name])]
    assert moved == ["q_proj.weight"]
    resumed = MasterOptimizer(TinyNetwork(), OptimizerFlags(), PEAK)
    resumed.load_state(copy.deepcopy(optimizer.state()))
