"""The load-time self-test: which layout it chooses, what it prints, and which faults it detects."""

import numpy as np
import pytest
import torch
from networks import make_network, make_plain
from torch.testing import assert_close
from transformers import AutoModelForCausalLM as CausalLM
from transformers import (
    BloomConfig,
    CpmAntConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PreTrainedModel,
    Qwen3NextConfig,
)
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrlhf.data.collate import pack, pad
from openrlhf.errors import ConfigError
from openrlhf.models import forward, inputs, self_test
from openrlhf.models.attention import SEGMENTED, fitting_attention
from openrlhf.models.forward import LogProbs, Network, OwnLogProbs
from openrlhf.models.heads import VocabularyHead
from openrlhf.models.modes import attention_of, in_fp32, kernel_functions, reference_kernels
from openrlhf.models.self_test import choose_layout
from openrlhf.types import TokenRow
from tests.models.architectures import build as tiny

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "initializer_range": 0.3,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES = {
    "lfm2": lambda: Lfm2Config(**SHAPE, **TOKENS, layer_types=["conv", "full_attention", "conv", "conv"]),
    "qwen3_next": lambda: Qwen3NextConfig(**SHAPE, **TOKENS, **EXPERTS, **DELTA, num_experts=4),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SHAPE,
        **TOKENS,
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention", "mamba", "mamba"],
    ),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **TOKENS, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, initializer_range=0.3, **TOKENS),
    "cpmant": lambda: CpmAntConfig(
        hidden_size=32,
        num_attention_heads=4,
        dim_head=8,
        dim_ff=48,
        num_hidden_layers=2,
        vocab_size=64,
        init_std=0.3,
        **TOKENS,
    ),
}


def build(family: str, *, packing: bool = True) -> Network:
    """Build a model as it is loaded: with the attention that auto chooses for its class."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model_class = CausalLM._model_mapping[type(config)]
    attention = fitting_attention(SEGMENTED if packing else "sdpa", model_class, config)
    return Network(CausalLM.from_config(config, attn_implementation=attention)).eval()


@torch.no_grad()
def settle(network: Network) -> Network:
    choose_layout(network, network)
    return network


def layout_of(network: Network) -> str:
    return f"{network.layout} {network.decoder.config._attn_implementation}"


@pytest.mark.parametrize(
    ("family", "settled", "why"),
    [
        ("lfm2", f"packed {SEGMENTED}", ""),
        ("qwen3_next", "padded sdpa", "packed with the packed kernel leaks between sequences"),
        ("granitemoehybrid", "padded sdpa", "packed with the packed kernel"),
        ("gpt_oss", "padded eager", "uses attention score caps or sinks"),
        ("bloom", "padded eager", ""),  # outside the attention registry: never loaded for packing
        ("cpmant", "row by row eager", "padded with eager differs from the model's own results by"),
    ],
)
def test_the_fastest_correct_layout_is_chosen(family, settled, why, capsys):
    network = settle(build(family))
    assert layout_of(network) == settled
    said = capsys.readouterr().err
    assert said.count("\n") == (1 if why else 0)
    assert why in said


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_state_share_no_prefixes(family):
    assert not settle(build(family)).shares_prefixes


@pytest.mark.parametrize("lay", [pack, lambda rows: pad(rows, 0)], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_layouts_compute_what_the_model_computes(family, lay):
    network = settle(build(family))
    random = np.random.default_rng(1)
    rows = [
        TokenRow(random.integers(3, 64, length).astype(np.int32), np.arange(length) > 1) for length in (11, 5, 23, 8)
    ]
    batch = lay(rows)
    with torch.no_grad():
        found = network(batch, LogProbs).log_probs
        with attention_of(network.decoder, "eager"):
            own = network(batch, OwnLogProbs).log_probs
    assert_close(found, own, rtol=0, atol=1e-4)


def test_a_convolution_does_not_see_the_previous_sequence(monkeypatch, capsys):
    """Without the gap after each sequence lfm2's convolutions leak, and the self-test detects it."""
    monkeypatch.setattr(Network, "_convolution_reach", 0)
    assert layout_of(settle(build("lfm2"))) == "padded sdpa"
    assert "packed with the packed kernel" in capsys.readouterr().err


def test_a_leak_through_a_decaying_state_is_detected(capsys):
    """With the step sizes of new weights, a state-space layer soon forgets: it leaks little, but it leaks."""
    network = Network(tiny("falcon_h1")).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(1.0)
    network.decoder.set_attn_implementation(SEGMENTED)
    network.layout = "packed"
    assert settle(network).layout == "padded"
    assert "packed with the packed kernel leaks between sequences" in capsys.readouterr().err


def test_lost_sequence_bounds_are_detected(monkeypatch, capsys):
    """Pass the bounds of a packed row as if it were a single sequence."""
    right = forward.packed_call

    def one_sequence(batch, gap):
        call = right(batch, gap)
        total = call.arguments["input_ids"].shape[1]
        bounds = torch.tensor([0, total], dtype=torch.int32)
        return inputs.DecoderCall(call.arguments | {"cu_seq_lens_q": bounds, "max_length_q": total}, call.batch_places)

    monkeypatch.setattr(forward, "packed_call", one_sequence)
    assert layout_of(settle(make_network("llama", SEGMENTED).eval())) == "padded sdpa"
    assert "packed with the packed kernel" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_incomplete_head_is_rejected(monkeypatch, dtype):
    network = make_network("granite", "sdpa", logits_scaling=0.2).to(dtype).eval()
    settle(network)
    monkeypatch.setattr(Network, "vocabulary_head", property(lambda self: VocabularyHead(self.decoder, 1.0)))
    with pytest.raises(
        ConfigError,
        match=r"no layout reproduces the forward pass of GraniteForCausalLM: .* differs from the model.s own results",
    ):
        settle(network)


def test_a_scalar_head_is_tested_too(monkeypatch):
    network = make_network("llama", SEGMENTED, scalar=True).eval()
    settle(network)
    assert layout_of(network) == f"packed {SEGMENTED}"
    broken = torch.nn.Linear(32, 1, bias=False)
    monkeypatch.setattr(Network, "scalar_head", property(lambda self: broken))
    with pytest.raises(ConfigError, match="no layout reproduces the forward pass of LlamaForSequenceClassification"):
        settle(network)


def test_nan_weights_are_rejected():
    network = make_network("llama", "sdpa").eval()
    with torch.no_grad():
        network.decoder.lm_head.weight[0] = torch.nan
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes nan"):
        settle(network)


def test_a_model_that_cannot_run_by_itself_is_rejected(monkeypatch):
    network = make_network("llama", "sdpa").eval()
    monkeypatch.setattr(type(network.decoder.model), "forward", lambda self, **kwargs: 1 / 0)
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM cannot run here: its own forward pass fails with ZeroDivisionError"
    ):
        settle(network)


def test_the_test_can_be_skipped(monkeypatch):
    monkeypatch.setattr(self_test, "make_probe", lambda network, forward: pytest.fail("tested all the same"))
    settle(Network(make_plain("llama"), self_test=False))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "gpt2"])
def test_widened_weights_compute_in_fp32_and_are_restored(kind):
    half = make_plain(kind).to(torch.bfloat16).eval()
    before = {name: parameter.clone() for name, parameter in half.named_parameters()}
    exact = make_plain(kind).eval()
    exact.load_state_dict(half.state_dict())
    for name, buffer in exact.named_buffers():
        buffer.copy_(half.get_buffer(name))
    ids = torch.arange(1, 20)[None]
    with torch.no_grad(), in_fp32(half):
        widened = half(input_ids=ids).logits
    with torch.no_grad():
        assert_close(widened.float(), exact(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
        assert (half(input_ids=ids).logits - widened).abs().max() > 1e-2
    assert_close(dict(half.named_parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_half_precision_is_measured_against_its_own_rounding(kind):
    """The tolerance of fp32 would reject every model in bf16."""
    network = make_network(kind, SEGMENTED).to(torch.bfloat16).eval()
    assert layout_of(settle(network)) == f"packed {SEGMENTED}"


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_a_leak_is_detected_in_half_precision_too(family, capsys):
    network = build(family).to(torch.bfloat16)
    assert settle(network).layout == "padded"
    assert "packed with the packed kernel leaks between sequences" in capsys.readouterr().err


def test_a_leak_in_training_mode_alone_is_detected(monkeypatch, capsys):
    """Some layers use other kernels in training mode; here these ignore the bounds of sequences."""
    right = forward.packed_call

    def forgetful(batch, gap):
        call = right(batch, gap)
        total = call.arguments["input_ids"].shape[1]
        bounds = torch.tensor([0, total], dtype=torch.int32)
        if not network.decoder.training:
            return call
        return inputs.DecoderCall(call.arguments | {"cu_seq_lens_q": bounds, "max_length_q": total}, call.batch_places)

    monkeypatch.setattr(forward, "packed_call", forgetful)
    network = make_network("llama", SEGMENTED).eval()
    settle(network)
    assert network.layout == "padded"
    assert not network.training
    assert "packed with the packed kernel differs from the model's own results by" in capsys.readouterr().err


def test_kernels_without_a_backward_pass_are_not_used_for_training(monkeypatch, capsys):
    def no_gradient(*args, **kwargs):
        output, weights = segmented_attention(*args, **kwargs)
        if torch.is_grad_enabled():
            raise RuntimeError("this kernel has no backward pass")
        return output, weights

    segmented_attention = ALL_ATTENTION_FUNCTIONS[SEGMENTED]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, SEGMENTED, no_gradient)
    assert settle(make_network("llama", SEGMENTED).eval()).layout == "padded"
    assert "fails with RuntimeError: this kernel has no backward pass" in capsys.readouterr().err
    frozen = make_network("llama", SEGMENTED).eval().requires_grad_(False)
    assert settle(frozen).layout == "packed"  # nothing to train


class Layered(PreTrainedModel):
    """A model whose module has a function with a kernel of another package: here math.fsum instead of a loop."""


def plus_one(numbers):
    return sum(numbers) + 1


total_of = use_kernel_func_from_hub_with_fallback("fsum", "math")(plus_one)


def test_reference_kernels_replace_packages_within_a_context():
    assert list(kernel_functions(Layered)) == []  # empty for the class itself, whose type is defined elsewhere
    model = object.__new__(Layered)
    assert list(kernel_functions(model)) == ["total_of"]
    assert total_of([1, 2]) == 3.0
    with reference_kernels(model):
        assert total_of([1, 2], seq_idx=None) == 4
        assert kernel_functions(model) == {}
    assert total_of([1, 2]) == 3.0
