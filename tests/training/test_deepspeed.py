"""Two processes under DeepSpeed train like one, with any kind of sharding. deepspeed_worker.py runs all cases once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.data.shared_prefixes import Sequences
from openrlhf.models.forward import LogProbs
from openrlhf.models.plain import checkpoint_places, load_weights
from openrlhf.training.deepspeed_config import NetworkFacts, engine_config, frozen_config
from openrlhf.training.local import LocalBackend, LocalFrozen
from tests.commands import free_port, run_processes, torchrun
from tests.tiny import make_model
from tests.training.deepspeed_cases import (
    RATE,
    SETTINGS,
    Distil,
    Sft,
    judged_rows,
    load_network,
    make_batch,
    step_batches,
    step_scorer,
    train,
    train_average,
)
from tests.warm import warm_python

pytestmark = pytest.mark.slow(seconds=2)
CPU = torch.device("cpu")
WORKER = "tests.training.deepspeed_worker"
LAUNCHED = "tests.training.deepspeed_launched"
MATRIX = [(stage, packed, lora) for stage in range(4) for packed in (False, True) for lora in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and all results of the two processes."""
    root = tmp_path_factory.mktemp("deepspeed")
    make_model(root / "llama")
    make_model(root / "tied", tie_word_embeddings=True)
    make_model(root / "mixtral", "mixtral")
    make_model(root / "teacher", seed=3)
    run_processes([*torchrun(2), "-m", WORKER, str(root)])
    return root


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())


class Local:
    """The same training in one process; each kind runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[Any, tuple[LocalBackend, dict[str, Any]]] = {}

    def __call__(self, model: str = "llama", *, packed: bool = False, **kwargs: Any) -> tuple[LocalBackend, Any]:
        key = (model, packed, *kwargs.items())
        if key not in self.done:
            backend = LocalBackend(
                load_network(self.folder / model, packed=packed, **kwargs), SETTINGS, CPU, learning_rate=RATE
            )
            self.done[key] = backend, train(backend, [step_batches(step, packed=packed) for step in range(3)])
        return self.done[key]


@pytest.fixture(scope="module")
def local(folder: Path) -> Local:
    return Local(folder)


def summed_losses(shares: list[dict[str, Any]]) -> list[float]:
    return [sum(parts) for parts in zip(*(share["losses"] for share in shares), strict=True)]


def assert_same_training(shares: list[dict[str, Any]], expected: dict[str, Any], atol: float = 1e-5) -> None:
    """Check that losses add up over ranks to those of one process, and that norms and metrics agree on each rank."""
    close = {"rtol": 0.0, "atol": atol}
    assert_close(torch.tensor(summed_losses(shares)), torch.tensor(expected["losses"]), **close)
    for share in shares:
        assert_close(torch.tensor(share["norms"]), torch.tensor(expected["norms"]), **close)
        assert_close(torch.tensor(share["metrics"]), torch.tensor(expected["metrics"]), rtol=1e-5, atol=atol)


def assert_same_weights(path: Path, backend: LocalBackend, atol: float = 1e-5) -> None:
    expected = dict(backend.weights())
    got = load_file(path)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(got[name], tensor, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("stage", "packed", "lora"), MATRIX)
def test_two_ranks_train_like_one_process(
    stage: int, packed: bool, lora: bool, folder: Path, ranks: list[dict[str, Any]], local: Local
) -> None:
    name = f"zero{stage}-{'packed' if packed else 'padded'}-{'lora' if lora else 'full'}"
    backend, expected = local(packed=packed, lora=lora)
    assert_same_training([rank["matrix"][name] for rank in ranks], expected)
    assert_same_weights(folder / f"{name}.safetensors", backend)


@pytest.mark.parametrize("name", ["overlap", "hierarchy", "compiled", "tied", "experts"])
def test_options_and_models_do_not_change_the_training(
    name: str, folder: Path, ranks: list[dict[str, Any]], local: Local
) -> None:
    kwargs = {"tied": {"model": "tied"}, "experts": {"model": "mixtral", "with_aux_loss": True}}.get(name, {})
    backend, expected = local(**kwargs)
    assert_same_training([rank["variants"][name] for rank in ranks], expected)
    assert all(rank["variants"][name]["compiled"] == (name == "compiled") for rank in ranks)
    assert_same_weights(folder / f"{name}.safetensors", backend)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_trains_like_one_on_the_device(
    stage: int, folder: Path, ranks: list[dict[str, Any]], local: Local
) -> None:
    backend, expected = local()
    name = f"offloaded-zero{stage}"
    assert_same_training([rank["offloaded"][name] for rank in ranks], expected)
    assert all(rank["offloaded"][name]["offloads"] for rank in ranks)
    assert_same_weights(folder / f"{name}.safetensors", backend)


def test_ranks_may_need_different_numbers_of_chunks(folder: Path, ranks: list[dict[str, Any]]) -> None:
    backend = LocalBackend(load_network(folder / "llama", packed=True), SETTINGS, CPU, learning_rate=RATE)
    batches = [make_batch([400] * 6, 1, packed=True), make_batch([9, 5], 2, packed=True)]
    assert_same_training([rank["uneven_chunks"] for rank in ranks], train(backend, [batches] * 2))


def test_ranks_of_a_sharded_reward_model_may_have_different_numbers_of_micro_batches(
    folder: Path, ranks: list[dict[str, Any]]
) -> None:
    alone = step_scorer(LocalFrozen(load_network(folder / "teacher", packed=True), CPU))
    for number, rank in enumerate(ranks):
        expected = alone.score_rows(judged_rows(number))
        assert_close(torch.tensor(rank["uneven_rounds"]), expected, rtol=0.0, atol=1e-5)
    assert len(alone.batching.cut(Sequences(judged_rows(0)))) > 1


def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """Each micro-batch is a share of one mean, so the sum is the gradient of a single one."""
    backend = LocalBackend(load_network(folder / "llama").to(torch.bfloat16), SETTINGS, CPU, learning_rate=RATE)
    backend.forward_backward([make_batch((4,), 1, packed=False)], Sft())
    norm = backend.optim_step(1.0)
    for rank in ranks:
        assert rank["long_sum"] == pytest.approx(norm, rel=0.01)


@pytest.mark.parametrize("name", ["zero3-full", "zero3-lora", "zero2-full", "zero0-lora"])
def test_resuming_equals_an_uninterrupted_run(
    name: str, folder: Path, ranks: list[dict[str, Any]], local: Local
) -> None:
    backend, expected = local(lora=name.endswith("lora"))
    resumed = [rank["resume"][f"resumed-{name}"] for rank in ranks]
    assert_same_training([rank["joined"] for rank in resumed], expected)
    for rank in resumed:
        for key, values in rank["again"].items():
            assert_close(torch.tensor(values), torch.tensor(rank["joined"][key][1:]), rtol=0.0, atol=1e-6)
    assert_same_weights(folder / f"resumed-{name}.safetensors", backend)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sleeping_between_steps_changes_nothing(
    stage: int, kind: str, ranks: list[dict[str, Any]], local: Local
) -> None:
    assert_same_training([rank["naps"][f"zero{stage}-{kind}"] for rank in ranks], local(lora=kind == "lora")[1])


def test_the_audit_finds_sharded_gradients_and_masters(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found_by_case = rank["audits"] | {"tensor parallel": rank["tensor_parallel_audit"]}
        for name, found in found_by_case.items():
            if name.startswith("forgotten"):
                assert "1 of 22 trainable parameters (model.layers.1.extra.weight) received no gradient" in found, name
            else:
                assert found == {"seen": [True] * 4, "hooks": 0, "steps": 3}, name
        assert len(found_by_case) == 15


def test_loading_in_shards_gives_the_same_model(folder: Path, ranks: list[dict[str, Any]], local: Local) -> None:
    saved = AutoModelForCausalLM.from_pretrained(folder / "llama").state_dict()
    for name, tensor in load_file(folder / "sharded-loading.safetensors").items():
        assert torch.equal(tensor, saved[name]), name
    assert all(rank["sharded"]["numbers_here"] == 0 for rank in ranks)
    assert_same_training([rank["sharded"]["full"] for rank in ranks], local()[1])
    assert_same_training([rank["sharded"]["lora"] for rank in ranks], local(lora=True)[1])


def test_a_sharded_teacher_gives_the_same_result_as_a_whole_one(folder: Path, ranks: list[dict[str, Any]]) -> None:
    teacher = LocalFrozen(load_network(folder / "teacher"), CPU)
    batch = make_batch((9, 5), 3, packed=False)
    look = teacher.forward(batch, LogProbs).log_probs
    backend = LocalBackend(load_network(folder / "llama"), SETTINGS, CPU, learning_rate=RATE)
    distilled = train(backend, [step_batches(step, packed=False) for step in range(3)], Distil(teacher))
    evaluated = backend.evaluate(step_batches(0, packed=False), Sft())["gpt_loss"]
    here = backend.forward(batch, LogProbs).log_probs
    assert_same_training([rank["frozen"]["distilled"] for rank in ranks], distilled)
    for rank in ranks:
        got = rank["frozen"]
        for sent in got["looks"]:
            assert_close(torch.tensor(sent), look, rtol=0.0, atol=1e-5)
        assert_close(torch.tensor(got["forward"]), here, rtol=0.0, atol=1e-4)
        assert_close(torch.tensor(got["evaluated"]), torch.stack([evaluated.total, evaluated.count]).float())
        assert got["sum"] == [3.0, 4.0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("model", ["llama", "tied"])
def test_tensor_parallel_ranks_train_like_one_process(
    stage: int, model: str, folder: Path, ranks: list[dict[str, Any]], local: Local
) -> None:
    backend, expected = local(model)
    name = f"tensor-parallel-zero{stage}-{model}"
    for rank in ranks:
        assert_same_training([rank["tensor_parallel"][name]], expected)
    assert_same_weights(folder / f"{name}.safetensors", backend)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_moving_average_is_that_of_one_process(stage: int, folder: Path, ranks: list[dict[str, Any]]) -> None:
    alone = LocalBackend(load_network(folder / "llama"), SETTINGS, CPU, learning_rate=RATE)
    expected = train_average(alone, [step_batches(step, packed=False) for step in range(3)]).tensors
    for name in (f"average-zero{stage}", f"average-zero{stage}-resumed"):
        found = load_file(folder / name / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_close(found[key], tensor, rtol=0.0, atol=1e-5)
    whole = sum(tensor.numel() for tensor in expected.values())
    held = [rank["averages"][f"zero{stage}"] for rank in ranks]
    assert sum(held) == whole
    assert min(held) == (0 if stage == 2 else pytest.approx(whole / 2, rel=0.01))


def test_tensor_parallel_training_resumes(ranks: list[dict[str, Any]], local: Local) -> None:
    for rank in ranks:
        assert_same_training([rank["tensor_parallel_resume"]], local()[1])


EXPORTS = {
    "zero2-packed-full": "llama",
    "zero3-packed-full": "llama",
    "hierarchy": "llama",
    "tied": "tied",
    "experts": "mixtral",
    "tensor-parallel-zero2-llama": "llama",
    "tensor-parallel-zero3-tied": "tied",
}


def load_sent_weights(folder: Path, model: str, name: str) -> Any:
    """Load the plain model with the weights that an engine received."""
    network = load_network(folder / model)
    sent = load_file(folder / f"{name}.safetensors")
    loaded = [key for key, _ in load_weights(checkpoint_places(network), sent.items())]
    assert loaded == list(sent)
    return network.decoder.eval()


def assert_same_outputs(exported: Any, sent: Any) -> None:
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert_close(exported(ids).logits, sent(ids).logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_load_in_plain_transformers(name: str, folder: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{name}", dtype=torch.float32).eval()
    assert_same_outputs(exported, load_sent_weights(folder, EXPORTS[name], name))


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_exported_alone(stage: int, folder: Path) -> None:
    name = f"zero{stage}-packed-lora"
    files = {path.name for path in (folder / f"export-{name}").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not any(file.startswith("model") or file.endswith(".bin") for file in files)
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    exported = PeftModel.from_pretrained(base, folder / f"export-{name}").eval()
    assert_same_outputs(exported, load_sent_weights(folder, "llama", name))


def read(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def test_a_universal_checkpoint_continues_in_one_plain_process(folder: Path, local: Local) -> None:
    checkpoint = folder / "checkpoint-resumed-zero3-full"
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    run_processes(
        [*convert, "--input_folder", str(checkpoint / "deepspeed"), "--output_folder", str(checkpoint / "universal")]
    )
    run_processes([*warm_python(), "-m", LAUNCHED, str(folder), "plain", "--universal", str(checkpoint)])
    (seen,) = read(folder, "plain", 1)
    assert seen["world"] == 1
    expected = {key: values[1:] for key, values in local()[1].items()}
    assert_same_training([seen], expected)


def test_the_deepspeed_launcher_starts_two_ranks(folder: Path, local: Local) -> None:
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
    run_processes([*launcher, "--master_port", free_port(), "--module", LAUNCHED, str(folder), "launcher"])
    seen = read(folder, "launcher", 2)
    assert [(one["world"], one["local"]) for one in seen] == [(2, "0"), (2, "1")]
    assert_same_training(seen, local()[1])


def network_facts(**facts: Any) -> NetworkFacts:
    usual = {"dtype": torch.bfloat16, "device_type": "cuda", "hidden_size": 64, "num_parameters": 1000}
    return NetworkFacts(**usual | facts)


def test_flags_become_deepspeed_settings() -> None:
    sharding = ShardingFlags(zero_stage=3, adam_offload=True, zpg=2, overlap_comm=True, grad_accum_dtype="fp32")
    config = engine_config(sharding, SETTINGS.max_norm, network_facts(), universal=True)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["zero_hpz_partition_size"] == 2
    assert zero["overlap_comm"]
    assert zero["stage3_param_persistence_threshold"] == 640
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["gradient_clipping"] == SETTINGS.max_norm
    assert config["checkpoint"] == {"load_universal": True}
    assert not config["managed_gradient_accumulation"]


def test_offloading_has_no_effect_on_a_cpu() -> None:
    here = network_facts(dtype=torch.float32, device_type="cpu")
    assert (
        "offload_optimizer"
        not in engine_config(ShardingFlags(adam_offload=True), SETTINGS.max_norm, here)["zero_optimization"]
    )
    sharded = ShardingFlags(zero_stage=3)
    assert "offload_param" not in frozen_config(sharded, here, offload=True)["zero_optimization"]
    assert "offload_param" in frozen_config(sharded, network_facts(), offload=True)["zero_optimization"]


def test_tensor_parallelism_keeps_complete_logits() -> None:
    config = engine_config(ShardingFlags(ds_tensor_parallel_size=2), SETTINGS.max_norm, network_facts())
    assert config["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}


@pytest.mark.parametrize(
    ("flags", "dtype", "summed_in"),
    [
        ({"zero_stage": 3}, torch.bfloat16, "fp32"),
        ({"zero_stage": 2, "grad_accum_dtype": "bf16"}, torch.bfloat16, "bf16"),
        ({"zero_stage": 1}, torch.bfloat16, "fp32"),
        ({"zero_stage": 0, "grad_accum_dtype": "bf16"}, torch.bfloat16, "bf16"),
        ({"zero_stage": 1}, torch.float16, None),
        ({"zero_stage": 2}, torch.float32, None),
        ({"zero_stage": 2, "grad_accum_dtype": "bf16"}, torch.float32, None),
    ],
)
def test_sharded_bf16_gradients_are_summed_in_fp32(flags: dict[str, Any], dtype: torch.dtype, summed_in: str) -> None:
    config = engine_config(ShardingFlags(**flags), SETTINGS.max_norm, network_facts(dtype=dtype))
    assert config.get("data_types", {"grad_accum_dtype": None}) == {"grad_accum_dtype": summed_in}
