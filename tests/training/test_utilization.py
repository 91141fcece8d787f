"""Model FLOPs utilization: counts by hand and against PyTorch, and the peaks of devices."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.sections.model import LoraFlags
from openrlhf.data.collate import collate
from openrlhf.models.forward import Network
from openrlhf.models.load import add_adapters
from openrlhf.training.utilization import (
    MatrixSizes,
    StepSize,
    UtilizationMeter,
    peak_flops,
    step_flops,
)
from openrlhf.types import TokenRow
from tests.tiny import CONFIGS

VOCABULARY = 100
# For a Llama with hidden size 32, MLP 64, 2 layers, 4 heads of 8 and 2 key heads: queries and outputs 32 x 32 each,
# keys and values 32 x 16 each, and three matrices of 32 x 64.
LAYERS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
HEAD = 32 * VOCABULARY


def make_decoder(kind="llama", **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](vocab_size=VOCABULARY, **changes))


def row_of(length):
    return TokenRow(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))


def test_a_step_by_hand():
    sizes = MatrixSizes(trained=1000, frozen=0, trained_head=200, frozen_head=0, attention=50)
    # Sequences of 10 and 20 tokens: 6 x 1000 x (10 + 20) + 6 x 200 x 12 + 12 x 50 x (100 + 400) / 2
    assert step_flops(sizes, StepSize(tokens=30, pairs=250, targets=12)) == 180_000 + 14_400 + 150_000


def test_frozen_matrices_need_no_weight_gradient():
    sizes = MatrixSizes(trained=10, frozen=1000, trained_head=0, frozen_head=200, attention=0)
    assert step_flops(sizes, StepSize(tokens=30, pairs=450, targets=12)) == 6 * 10 * 30 + 4 * 1000 * 30 + 4 * 200 * 12


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_count_only_as_the_head(tied):
    sizes = MatrixSizes.of(Network(make_decoder(tie_word_embeddings=tied)))
    assert sizes == MatrixSizes(LAYERS, 0, HEAD, 0, attention=2 * 32)


def test_adapters_are_trained_and_the_rest_is_frozen():
    model = add_adapters(make_decoder(), LoraFlags(lora_rank=4, target_modules=("q_proj",)), scalar=False)
    sizes = MatrixSizes.of(Network(model))
    assert sizes == MatrixSizes(2 * 4 * (32 + 32), LAYERS, 0, HEAD, attention=2 * 32)


def test_a_scalar_head_counts_and_needs_no_vocabulary():
    config = CONFIGS["llama"](vocab_size=VOCABULARY, num_labels=1)
    sizes = MatrixSizes.of(Network(AutoModelForSequenceClassification.from_config(config), self_test=False))
    assert (sizes.trained, sizes.trained_head) == (LAYERS + 32, 0)


def test_a_token_counts_for_the_experts_that_it_is_routed_to():
    all_of_them, two_of_four = (
        MatrixSizes.of(Network(make_decoder("qwen3_moe", num_experts_per_tok=number))) for number in (4, 2)
    )
    experts = 2 * 4 * 3 * 32 * 16  # layers x experts x matrices of 32 x 16
    assert all_of_them.trained - two_of_four.trained == experts / 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_has_sizes(kind):
    sizes = MatrixSizes.of(Network(make_decoder(kind)))
    assert min(sizes.trained, sizes.trained_head, sizes.attention) > 0


def test_the_count_agrees_with_that_of_pytorch():
    model, length = make_decoder(attn_implementation="eager"), 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    sizes = MatrixSizes.of(Network(model))
    # Eager attention computes all s x s pairs, and we count the half that is not masked.
    masked = 6 * sizes.attention * length**2
    step = StepSize(length, length**2 / 2, length)
    assert counter.get_total_flops() == step_flops(sizes, step) + masked


@pytest.mark.parametrize("packing", [False, True])
def test_padding_does_not_count(packing):
    batch = collate([row_of(5), row_of(2), row_of(9)], packing=packing, pad_id=0)
    step = StepSize.of(Network(make_decoder()), batch)
    assert step == (16, (25 + 4 + 81) / 2, 4 + 1 + 8)  # the first token of a sequence is not a target


def test_a_prompt_that_is_computed_once_counts_once():
    network, (short, long) = Network(make_decoder()), (row_of(30), row_of(34))
    long.input_ids[29] = 99  # both start with the same 29 tokens
    batch = collate([short, long], packing=True, pad_id=0)
    assert StepSize.of(network, batch) == (64, (30**2 + 34**2) / 2, 62)
    network.shares_prefixes = True
    assert StepSize.of(network, batch) == (64 - 29, (30**2 + 34**2 - 29**2) / 2, 62)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA H20", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_peaks_by_name(name, teraflops):
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def test_a_cpu_has_no_utilization():
    meter = UtilizationMeter(Network(make_decoder()), torch.device("cpu"))
    meter.begin([])
    assert meter.read() == {}


def test_utilization_is_the_share_of_the_peak(monkeypatch):
    meter = UtilizationMeter(Network(make_decoder()), torch.device("cpu"))
    meter.peak, meter.sizes = 1e6, MatrixSizes(1000, 0, 0, 0, attention=0)
    clock = iter([100.0, 102.0, 102.0])
    monkeypatch.setattr("openrlhf.training.utilization.time.perf_counter", lambda: next(clock))
    meter.begin([collate([row_of(50)], packing=True, pad_id=0)])
    assert meter.read() == {"mfu": 6 * 1000 * 50 / 2 / 1e6}
    assert meter.read(processes=4) == {"mfu": 6 * 1000 * 50 / 2 / 1e6 / 4}
