"""The numbers that a run prints before it starts, against numbers worked by hand."""

import shlex

import pytest

from openrlhf.config.batch_table import Line, render, rl_table, supervised_table
from openrlhf.config.commands import RLConfig, SFTConfig
from openrlhf.config.parser import parse


def sft(argv):
    return {line.name: line.value for line in supervised_table(parse(SFTConfig, shlex.split(argv), environ={}))}


def rl(argv):
    return {line.name: line.value for line in rl_table(parse(RLConfig, shlex.split(argv), environ={}))}


def test_one_process_accumulates_the_whole_batch():
    assert sft("--train_batch_size 256 --micro_train_batch_size 2 --max_len 4096 --max_epochs 1") == {
        "devices": "1",
        "samples per step": "256",
        "samples per device and step": "256",
        "micro-batches per step": "128",
        "tokens per step, at most": "1,048,576",
        "epochs": "1",
    }


def test_processes_share_the_batch_except_those_that_share_a_sequence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    table = sft("--train_batch_size 256 --micro_train_batch_size 2 --ring_attn_size 2 --packing_samples")
    assert table["devices"] == "4"
    assert table["samples per device and step"] == "64"
    assert table["micro-batches per step"] == "32"


def test_a_remainder_is_one_more_micro_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    table = sft("--train_batch_size 100 --micro_train_batch_size 8")  # 34 + 33 + 33; 34 is four of 8 and one of 2
    assert table["samples per device and step"] == "34"
    assert table["micro-batches per step"] == "5"


def test_a_rollout_on_a_cluster():
    table = rl(
        "--actor_num_gpus_per_node 8 --vllm_num_engines 8 --rollout_batch_size 128 --n_samples_per_prompt 8 "
        "--train_batch_size 256 --micro_train_batch_size 4 --micro_rollout_batch_size 16 --max_epochs 2 --max_len 4096"
    )
    assert table == {
        "runtime": "ray",
        "prompts per rollout": "128",
        "samples per rollout": "1,024",
        "scoring micro-batches": "8",  # 1024 / 8 devices / 16
        "samples per optimizer step": "256",
        "training micro-batches": "8",  # 256 / 8 devices / 4
        "optimizer steps per rollout": "8",  # 1024 / 256 x 2 epochs
        "tokens per step, at most": "1,048,576",  # 256 x 4096
        "passes over the prompts": "1",
    }


def test_the_defaults_in_one_process():
    table = rl("")
    assert table["runtime"] == "local"
    assert table["scoring micro-batches"] == "128"  # 1024 / 8
    assert table["training micro-batches"] == "32"  # 128 / 4
    assert table["optimizer steps per rollout"] == "8"
    assert table["tokens per step, at most"] == "262,144"  # 128 x (1024 + 1024)


def test_devices_that_share_a_sequence_count_once():
    table = rl("--actor_num_gpus_per_node 8 --ring_attn_size 2 --ds_tensor_parallel_size 2 --train_batch_size 128")
    assert table["training micro-batches"] == "16"  # 128 / 2 / 4


@pytest.mark.parametrize(
    ("batch", "step", "steps"),
    [(64, "64", "1"), (128, "128", "1"), (129, "128", "2"), (200, "128", "2")],
)
def test_a_rollout_that_does_not_divide_ends_with_a_smaller_step(batch, step, steps):
    table = rl(f"--rollout_batch_size {batch} --train_batch_size 128")
    assert table["samples per optimizer step"] == step
    assert table["optimizer steps per rollout"] == steps


def test_dynamic_batches_are_counted_in_tokens():
    argv = "--use_dynamic_batch --train_max_tokens_per_gpu 8192"
    lines = {line.name: line for line in rl_table(parse(RLConfig, argv.split(), environ={}))}
    for name in ("scoring micro-batches", "training micro-batches"):
        assert lines[name].value == "by tokens"
        assert "8,192 tokens" in lines[name].how


def test_scoring_may_have_its_own_token_budget():
    argv = "--use_dynamic_batch --train_max_tokens_per_gpu 8192 --rollout_max_tokens_per_gpu 32768"
    lines = {line.name: line for line in rl_table(parse(RLConfig, argv.split(), environ={}))}
    assert "32,768" in lines["scoring micro-batches"].how
    assert "8,192" in lines["training micro-batches"].how


def test_columns_are_aligned():
    assert (
        render([Line("a", "1,024", "x"), Line("long name", "8", "y")]) == "  a          1,024  x\n  long name      8  y"
    )
