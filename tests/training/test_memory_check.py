"""A run that cannot fit is rejected, a tight one is reported, and a device that fills up during a run is explained."""

import pytest
import torch
from transformers import LlamaConfig

from openrlhf.config.commands import SFTConfig
from openrlhf.config.parser import parse
from openrlhf.errors import BackendError, ConfigError, DeviceMemoryError
from openrlhf.models.forward import Network
from openrlhf.plan.gpus import GIB, GPUS, Machine
from openrlhf.training import memory_check
from openrlhf.training.local import LocalBackend
from openrlhf.training.memory_check import check_memory, detect_machine, explain_memory, is_out_of_memory
from tests.commands import FAST, as_argv, run_command
from tests.tiny import make_tokenizer
from tests.toy_data import ANSWERS, answers, write_rows

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB."


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with the config of a model of 1.5B parameters, and no weights."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 22, "num_attention_heads": 16}
    LlamaConfig(**shape).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def config_of(model, **flags):
    given = {"pretrain": model, "dataset": "rows.jsonl", "max_len": 1024, "micro_train_batch_size": 1} | flags
    return parse(SFTConfig, as_argv(given), environ={})


def test_a_run_that_cannot_fit_is_rejected_with_its_largest_terms_and_flags(large):
    with pytest.raises(ConfigError) as caught:
        check_memory(config_of(large), Machine(GPUS["T4"]))
    message = str(caught.value)
    assert message.startswith("the run cannot fit: training needs ")
    assert "of 14.6 GiB on each device: model optimizer states " in message
    assert message.endswith("Try: --adam_offload, or --skip_memory_check to start anyway")


def test_fsdp_has_its_own_arithmetic(large, capsys):
    """One process holds 16 bytes for each of 1.6B parameters: 24 GiB."""
    check_memory(config_of(large, backend="fsdp"), Machine(GPUS["A100-40"]))
    assert "cannot fit" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"the run cannot fit: training needs .*: model optimizer states ") as caught:
        check_memory(config_of(large, backend="fsdp"), Machine(GPUS["T4"]))
    assert "--zero_stage" not in str(caught.value)
    assert "--load_in_4bit" not in str(caught.value)


def test_the_check_can_be_skipped(large, capsys):
    check_memory(config_of(large, skip_memory_check=True), Machine(GPUS["T4"]))
    check_memory(config_of(large), None)  # an unknown machine
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("micro", "line"),
    [
        (1, ""),
        (38, "openrlhf: the run is tight: training needs "),
        (64, "openrlhf: the run may run out of memory: training needs "),
    ],
)
def test_a_tight_run_is_reported_in_one_line(large, micro, line, capsys):
    check_memory(config_of(large, micro_train_batch_size=micro), Machine(GPUS["H200"]))
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert told.count("\n") == bool(line)
    assert ("If it does not fit: --gradient_checkpointing" in told) == bool(line)


def test_on_a_cpu_only_weights_and_optimizer_count(large, capsys):
    states = 12 * 1.6 * 1e9 / GIB  # fp32 weights and two moments
    check_memory(config_of(large, micro_train_batch_size=64), Machine(None, host_memory=2 * states * GIB))
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="cannot fit"):
        check_memory(config_of(large), Machine(None, host_memory=states / 2 * GIB))


def test_a_model_that_does_not_build_is_not_judged(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    check_memory(config_of(str(tmp_path)), Machine(GPUS["T4"]))


def test_a_command_rejects_a_run_before_it_loads_anything(large, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "detect_machine", lambda asked="auto": Machine(GPUS["T4"]))
    monkeypatch.setattr("openrlhf.training.supervised.detect_machine", lambda asked: Machine(GPUS["T4"]))
    flags = {"pretrain": large, "dataset": write_rows(tmp_path / "rows.jsonl", answers(8)), "max_len": 1024}
    with pytest.raises(SystemExit) as ended:
        run_command("train_sft", flags | ANSWERS | {"save_path": str(tmp_path / "out"), "device": "cpu"})
    assert ended.value.code == 2
    assert "the run cannot fit: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_this_machine_is_found():
    machine = detect_machine("cpu")
    assert machine.gpu is None
    assert machine.host_memory > 0


# During a run.


def raise_full(*args, **kwargs):
    raise torch.OutOfMemoryError(FULL)


def test_an_out_of_memory_error_names_the_phase_and_the_flags_that_help(large):
    with (
        pytest.raises(DeviceMemoryError) as caught,
        explain_memory(config_of(large), "training", Machine(GPUS["H200"])),
    ):
        raise_full()
    message = str(caught.value)
    assert message.startswith("out of GPU memory in training, which was planned to need ")
    assert " of 139.8 GiB (model optimizer states " in message
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in message
    assert "; openrlhf plan shows the rest" in message
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_an_unknown_machine_has_no_plan(large):
    with (
        pytest.raises(DeviceMemoryError, match="out of GPU memory in sync: CUDA"),
        explain_memory(config_of(large), "sync", None),
    ):
        raise_full()


def test_other_errors_pass_and_an_explanation_is_given_once(large):
    machine, config = Machine(GPUS["H200"]), config_of(large)
    with pytest.raises(BackendError, match=r"^another$"), explain_memory(config, "training", machine):
        raise BackendError("another")
    with (
        pytest.raises(DeviceMemoryError, match="in generation"),
        explain_memory(config, "saving", machine),
        explain_memory(config, "generation", machine),
    ):
        raise_full()


def test_the_cause_of_another_error_is_found():
    failed = BackendError("the engine failed")
    failed.__cause__ = torch.OutOfMemoryError(FULL)
    assert is_out_of_memory(failed)
    assert is_out_of_memory(RuntimeError("vLLM did not start: CUDA out of memory"))
    assert not is_out_of_memory(BackendError("a disk"))
    assert not is_out_of_memory(None)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("owner", "method", "phase"),
    [(Network, "forward", "loading"), (LocalBackend, "backward", "training"), (LocalBackend, "optim_step", "training")],
)
def test_a_command_ends_with_one_line(owner, method, phase, tmp_path, models, monkeypatch, capsys):
    monkeypatch.setattr(owner, method, raise_full)
    rows = write_rows(tmp_path / "rows.jsonl", answers(16))
    flags = {"pretrain": models(), "dataset": rows, "save_path": "./sft", "device": "cpu"}
    with pytest.raises(SystemExit) as ended:
        run_command("train_sft", FAST | ANSWERS | flags)
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"openrlhf: error: out of GPU memory in {phase}")
