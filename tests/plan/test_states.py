"""Weights, optimizer and gradients by hand, for each way of training: N parameters, in bytes per parameter."""

from dataclasses import replace

import pytest

from openrlhf.plan.gpus import GPUS, Machine
from openrlhf.plan.shapes import shape_of
from openrlhf.plan.states import NF4, ModelPlace, gathered_terms
from openrlhf.plan.terms import total
from tests.plan.conftest import LARGE, SMALL, sizes
from tests.tiny import CONFIGS

SFT = f"train_sft --pretrain {SMALL} --max_len 512 --micro_train_batch_size 2"
EIGHT = Machine(GPUS["A100-80"], 8)


def phase_of(plan, command, machine=None, name="training"):
    return plan(command, machine).phase(name)


@pytest.mark.parametrize(
    ("flags", "machine", "weights", "optimizer", "gradients"),
    [
        ("", None, 2, 12, 4),
        ("--param_dtype fp32", None, 4, 8, 4),
        ("--adam_offload", None, 2, 0, 0),
        ("--zero_stage 0", EIGHT, 2, 12, 6),
        ("--zero_stage 1", EIGHT, 2, 12 / 8, 4),
        ("--zero_stage 2", EIGHT, 2, 12 / 8, 4 / 8),
        ("--zero_stage 3", EIGHT, 2 / 8, 12 / 8, 4 / 8),
        ("--zero_stage 2 --adam_offload", EIGHT, 2, 0, 0),
        ("--backend fsdp", None, 0, 12, 4),
        ("--backend fsdp", EIGHT, 0, 12 / 8, 4 / 8),  # the shards are the masters
        ("--backend fsdp --zero_stage 0 --ds_tensor_parallel_size 2", EIGHT, 0, 12 / 8, 4 / 8),
        ("--backend fsdp --adam_offload", EIGHT, 0, 0, 0),
        ("", Machine(None), 4, 8, 4),
    ],
)
def test_bytes_per_parameter(plan, shapes, flags, machine, weights, optimizer, gradients):
    found = sizes(phase_of(plan, f"{SFT} {flags}", machine).device)
    count = shapes[SMALL, False].parameters
    assert found.get("weights", 0) == pytest.approx(weights * count)
    assert found.get("fp32 masters", 0) + found.get("optimizer states", 0) == pytest.approx(optimizer * count)
    assert found.get("gradients", 0) == pytest.approx(gradients * count)


def test_an_offloaded_optimizer_is_in_host_memory(plan, shapes):
    count = shapes[SMALL, False].parameters
    found = sizes(phase_of(plan, f"{SFT} --adam_offload").host)
    assert found["fp32 masters"] + found["optimizer states"] == pytest.approx(12 * count)
    several = sizes(phase_of(plan, f"{SFT} --adam_offload", EIGHT).host)  # a node holds all shards
    assert several["optimizer states"] == pytest.approx(8 * count)


def test_adapters_have_their_own_states_and_the_base_may_have_four_bits(plan, shapes):
    shape = shapes[SMALL, False]
    adapters = 8 * sum(shape.adapters.values())
    found = sizes(phase_of(plan, f"{SFT} --lora_rank 8").device)
    assert found["weights"] == pytest.approx(2 * shape.parameters + 4 * adapters)
    assert found["optimizer states"] == pytest.approx(8 * adapters)
    assert "fp32 masters" not in found
    quantised = sizes(phase_of(plan, f"{SFT} --lora_rank 8 --load_in_4bit").device)
    rest = shape.parameters - shape.linear
    assert quantised["weights"] == pytest.approx(NF4 * shape.linear + 4 * rest + 4 * adapters)


def test_fsdp_gathers_embeddings_and_some_layers_for_a_pass_only(plan, shapes):
    shape = shapes[SMALL, False]
    whole = plan(f"{SFT} --backend fsdp", EIGHT)
    outer = shape.parameters - shape.layers * shape.layer
    assert outer == shape.embedding + shape.hidden  # the head is tied, and the last norm has no layer
    assert sizes(whole.phase("training").device)["gathered layers"] == pytest.approx(2 * (outer + 3 * shape.layer))
    assert sizes(whole.phase("training").device)["reduce buckets"] == pytest.approx(6 * outer)
    assert "gathered layers" not in sizes(whole.phase("saving").device)
    split = sizes(plan(f"{SFT} --backend fsdp --ds_tensor_parallel_size 2", EIGHT).phase("training").device)
    assert split["gathered layers"] == pytest.approx(2 * (outer + 3 * shape.layer / 2))


def test_fsdp_gathers_only_the_experts_of_a_process(plan):
    shape = shape_of(CONFIGS["qwen3_moe"](vocab_size=100))
    assert shape.experts == 4 * 3 * 16 * 32  # four experts of three matrices
    work = plan(f"{SFT} --backend fsdp", EIGHT).work
    whole, half = (
        ModelPlace(
            replace(work, sharding=replace(work.sharding, expert_parallel_size=size)),
            work.groups[0],
            work.groups[0].models[0],
            shape,
        )
        for size in (1, 2)
    )
    saved = total(gathered_terms(whole)) - total(gathered_terms(half))
    assert saved == pytest.approx(2 * shape.layers * shape.experts / 2)


def test_fsdp_divides_adapters_frozen_weights_and_frozen_models(plan, shapes):
    shape = shapes[SMALL, False]
    adapters = 8 * sum(shape.adapters.values())
    found = sizes(phase_of(plan, f"{SFT} --backend fsdp --lora_rank 8", EIGHT).device)
    assert found["weights"] == pytest.approx(2 * shape.parameters / 8)
    assert found["fp32 masters"] + found["optimizer states"] == pytest.approx(12 * adapters / 8)
    dpo = f"train_dpo --pretrain {SMALL} --max_len 512 --micro_train_batch_size 1 --backend fsdp"
    here = [term for term in phase_of(plan, dpo, EIGHT, "saving").device if term.role == "reference"]
    assert sizes(here) == {"weights": pytest.approx(2 * (shape.parameters / 8 + shape.head * 7 / 8))}
    moved = plan(f"{dpo} --ref_offload --adam_offload", EIGHT).phase("training")
    assert sizes(moved.device)["weights"] == pytest.approx(2 * shape.head)
    host = sizes(moved.host)  # a node holds all shards
    assert host["offloaded"] == pytest.approx(2 * (shape.parameters - shape.head))
    assert host["fp32 masters"] + host["optimizer states"] + host["gradients"] == pytest.approx(16 * shape.parameters)


def test_only_named_modules_get_adapters(plan, shapes):
    found = sizes(phase_of(plan, f"{SFT} --lora_rank 8 --target_modules q_proj v_proj").device)
    adapters = shapes[SMALL, False].adapters
    assert found["optimizer states"] == pytest.approx(8 * 8 * (adapters["q_proj"] + adapters["v_proj"]))


def test_a_frozen_model_is_on_the_device_or_offloaded(plan, shapes):
    dpo = f"train_dpo --pretrain {SMALL} --max_len 512 --micro_train_batch_size 1"
    count, head = shapes[SMALL, False].parameters, shapes[SMALL, False].head
    here = [term for term in phase_of(plan, dpo).device if term.role == "reference"]
    assert sizes(here) == {"weights": 2 * count}
    moved = plan(f"{dpo} --ref_offload")
    assert sizes(t for t in moved.phase("training").device if t.role == "reference") == {"weights": 2 * head}
    assert sizes(moved.phase("training").host)["offloaded"] == pytest.approx(2 * (count - head))


def test_rings_and_micro_batches_divide_activations(plan):
    whole = sizes(phase_of(plan, f"{SFT} --packing_samples", EIGHT).device)["activations"]
    half = sizes(phase_of(plan, f"{SFT} --packing_samples --ring_attn_size 2", EIGHT).device)["activations"]
    one = sizes(phase_of(plan, f"{SFT} --packing_samples --micro_train_batch_size 1", EIGHT).device)["activations"]
    assert half == one == pytest.approx(whole / 2)


@pytest.mark.parametrize("flags", ["--backend fsdp", "--zero_stage 3"])
def test_tensor_parallelism_divides_what_is_inside_layers(plan, shapes, flags):
    shape, tokens = shapes[SMALL, False], 2 * 512
    command = f"{SFT} --packing_samples --train_batch_size 32 {flags}"
    whole = sizes(phase_of(plan, command, EIGHT).device)["activations"]
    half = sizes(phase_of(plan, f"{command} --ds_tensor_parallel_size 2", EIGHT).device)["activations"]
    inside = 2 * (2 * shape.queries + 2 * shape.keys) + 4 * 2 * shape.mlp
    assert whole - half == pytest.approx(shape.layers * tokens * inside / 2)


def test_pairs_have_two_rows(plan):
    flags = f"--pretrain {SMALL} --max_len 512 --micro_train_batch_size 1"
    pair = sizes(phase_of(plan, f"train_dpo {flags}").device)["activations"]
    single = sizes(phase_of(plan, f"train_sft {flags}").device)["activations"]
    assert pair == pytest.approx(2 * single)


@pytest.mark.parametrize(("flags", "each"), [("--zero_stage 3", 14), ("--backend fsdp", 12)])
def test_everything_of_70b_is_divided_by_16_devices(plan, shapes, flags, each):
    machine = Machine(GPUS["A100-80"], 8, 2)
    found = plan(f"train_sft --pretrain {LARGE} --max_len 4096 --micro_train_batch_size 1 {flags}", machine)
    states = sizes(found.phase("saving").device)
    kept = states.get("weights", 0) + states["fp32 masters"] + states["optimizer states"]
    assert kept == pytest.approx(each * shapes[LARGE, False].parameters / 16)
