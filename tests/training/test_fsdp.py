"""Two and four processes under FSDP train like one. fsdp_worker.py runs all cases once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from openrlhf.models.forward import LogProbs
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.training.fsdp import FOLDER
from openrlhf.training.fsdp_checkpoint import Block
from openrlhf.training.local import LocalBackend, LocalFrozen
from tests.commands import run_processes, torchrun
from tests.tiny import make_model
from tests.training.deepspeed_cases import (
    RATE,
    SETTINGS,
    Distil,
    Sft,
    judged_rows,
    load_network,
    make_batch,
    routed_batch,
    step_batches,
    step_scorer,
    train,
    train_average,
)
from tests.training.fsdp_tensor_parallel import CASES

pytestmark = pytest.mark.slow(seconds=2)
CPU = torch.device("cpu")
WORKER = "tests.training.fsdp_worker"
EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss"]
MATRIX = [(ranks, packed, lora) for ranks in (1, 2, 4) for packed in (False, True) for lora in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and the results of all launches."""
    root = tmp_path_factory.mktemp("fsdp")
    make_model(root / "llama")
    make_model(root / "tied", tie_word_embeddings=True)
    make_model(root / "shallow", num_hidden_layers=1)
    for family in EXPERTS:
        make_model(root / family, family)
    make_model(root / "teacher", seed=3)
    make_model(root / "qwen3", "qwen3")
    make_model(root / "many_heads", num_key_value_heads=4)
    for ranks in (4, 2, 1):  # the others resume from the checkpoints of the first launch
        run_processes([*torchrun(ranks), "-m", WORKER, str(root)])
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The results of each rank, by the number of ranks."""
    return {
        ranks: [json.loads((folder / f"results-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        for ranks in (1, 2, 4)
    }


class Local:
    """The same training in one process; each kind runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[Any, tuple[LocalBackend, dict[str, Any]]] = {}

    def __call__(self, model: str = "llama", *, packed: bool = False, **kwargs: Any) -> tuple[LocalBackend, Any]:
        key = (model, packed, *kwargs.items())
        if key not in self.done:
            network = load_network(self.folder / model, packed=packed, **kwargs)
            backend = LocalBackend(network, SETTINGS, CPU, learning_rate=RATE)
            self.done[key] = backend, train(backend, [step_batches(step, packed=packed) for step in range(3)])
        return self.done[key]


@pytest.fixture(scope="module")
def local(folder: Path) -> Local:
    return Local(folder)


def assert_same_training(shares: list[dict[str, Any]], expected: dict[str, Any], atol: float = 1e-5) -> None:
    """Check that losses add up over ranks to those of one process, and that norms and metrics agree on each rank."""
    losses = torch.tensor([share["losses"] for share in shares]).sum(0)
    assert_close(losses, torch.tensor(expected["losses"]), rtol=0.0, atol=atol)
    for share in shares:
        assert_close(torch.tensor(share["norms"]), torch.tensor(expected["norms"]), rtol=0.0, atol=atol)
        assert_close(torch.tensor(share["metrics"]), torch.tensor(expected["metrics"]), rtol=1e-5, atol=atol)


def assert_same_weights(path: Path, backend: LocalBackend) -> None:
    expected, found = dict(backend.weights()), load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=0.0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("ranks", "packed", "lora"), MATRIX)
def test_ranks_train_like_the_local_backend(
    ranks: int, packed: bool, lora: bool, folder: Path, results: dict[int, Any], local: Local
) -> None:
    name = f"{ranks}-{'packed' if packed else 'padded'}-{'lora' if lora else 'full'}"
    backend, expected = local(packed=packed, lora=lora)
    assert max(expected["norms"]) > SETTINGS.max_norm or lora  # gradients are clipped
    assert_same_training([rank["matrix"][name] for rank in results[ranks]], expected)
    assert_same_weights(folder / f"{name}.safetensors", backend)


@pytest.mark.parametrize("name", ["tied", "experts", "recomputed", "reentrant"])
def test_options_and_models_do_not_change_the_training(
    name: str, folder: Path, results: dict[int, Any], local: Local
) -> None:
    kwargs = {"tied": {"model": "tied"}, "experts": {"model": "mixtral", "with_aux_loss": True}}.get(name, {})
    backend, expected = local(**kwargs)
    assert_same_training([rank["variants"][name] for rank in results[2]], expected)
    assert_same_weights(folder / f"{name}.safetensors", backend)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", EXPERTS)
def test_divided_experts_train_like_one_process(
    model: str, ranks: int, folder: Path, results: dict[int, Any], local: Local
) -> None:
    backend, expected = local(model)
    shares = [rank["divided"][model] for rank in results[ranks]]
    whole = sum(parameter.numel() for parameter in backend.network.parameters())
    assert sum(share["here"] for share in shares) == whole
    assert max(share["here"] for share in shares) < 1.1 * whole / ranks
    assert_same_training(shares, expected)
    name = f"divided-{ranks}-{model}"
    assert_same_weights(folder / f"{name}.safetensors", backend)
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{name}", dtype=torch.float32)
    assert_close(outputs_of(exported), outputs_of(backend.network.decoder), rtol=0.0, atol=1e-4)
    backend.network.routed = RoutedLayers(backend.network.decoder)
    routed = backend.forward(routed_batch(), LogProbs).log_probs
    for share in shares:
        assert_close(torch.tensor(share["routed"]), routed, rtol=0.0, atol=1e-4)


def test_compiled_layers_train_like_others(folder: Path, results: dict[int, Any]) -> None:
    backend = LocalBackend(load_network(folder / "shallow"), SETTINGS, CPU, learning_rate=RATE)
    expected = train(backend, [step_batches(0, packed=False)])
    found = [rank["compiled"] for rank in results[2]]
    assert all(one.pop("compiled") for one in found)
    assert_same_training(found, expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_its_share(ranks: int, results: dict[int, Any]) -> None:
    held = [rank["shards"] for rank in results[ranks]]
    assert all(one["sharded"] for one in held)
    assert sum(one["here"] for one in held) == held[0]["whole"]
    for one in held:
        assert one["moments"] == 2 * one["here"]
        assert one["here"] < 1.1 * one["whole"] / ranks


@pytest.mark.parametrize("model", ["llama", "tied", "gpt_oss", "qwen3_moe"])
def test_weights_that_are_read_layer_by_layer_train_like_others(
    model: str, folder: Path, results: dict[int, Any], local: Local
) -> None:
    backend, expected = local(model)
    assert_same_training([rank["deferred"][model] for rank in results[2]], expected)
    assert_same_weights(folder / f"deferred-{model}.safetensors", backend)
    look = LocalFrozen(load_network(folder / "teacher"), CPU).forward(make_batch((9, 5), 3, packed=False), LogProbs)
    for rank in results[2]:
        assert_close(torch.tensor(rank["deferred"]["look"]), look.log_probs, rtol=0.0, atol=1e-5)


def test_ranks_may_have_different_numbers_of_head_chunks(folder: Path, results: dict[int, Any]) -> None:
    long, short = make_batch([400] * 6, 1, packed=True), make_batch([9, 5], 2, packed=True)
    backend = LocalBackend(load_network(folder / "llama", packed=True), SETTINGS, CPU, learning_rate=RATE)
    expected = train(backend, [[long, short]] * 2)
    assert_same_training([rank["uneven_chunks"] for rank in results[2]], expected)


def test_ranks_of_a_sharded_model_may_have_different_numbers_of_micro_batches(
    folder: Path, results: dict[int, Any]
) -> None:
    alone = step_scorer(LocalFrozen(load_network(folder / "teacher", packed=True), CPU))
    for number, rank in enumerate(results[2]):
        expected = alone.score_rows(judged_rows(number))
        assert_close(torch.tensor(rank["uneven_rounds"]), expected, rtol=0.0, atol=1e-5)


def test_bf16_has_fp32_masters_and_sums(folder: Path, results: dict[int, Any]) -> None:
    """Each micro-batch is a share of one mean, so the sum is the gradient of a single one."""
    backend = LocalBackend(load_network(folder / "llama").to(torch.bfloat16), SETTINGS, CPU, learning_rate=RATE)
    backend.forward_backward([make_batch((4,), 1, packed=False)], Sft())
    norm = backend.optim_step(1.0)
    for rank in results[2]:
        assert rank["half"].pop("norm") == pytest.approx(norm, rel=0.01)
        expected = {"masters": "float32", "sums": "float32", "sent": "bfloat16", "exported": "bfloat16"}
        assert rank["half"] == {name: [f"torch.{dtype}"] for name, dtype in expected.items()}


def test_only_trained_weights_are_widened(results: dict[int, Any]) -> None:
    for rank in results[2]:
        assert rank["half_lora"] == ["False torch.bfloat16", "True torch.float32"]


def test_fp16_gradients_that_overflow_skip_the_step_on_all_ranks(results: dict[int, Any]) -> None:
    one, two = (rank["loss_scale"] for rank in results[2])
    assert one == two
    assert one["norms"][0] is None
    assert one["norms"][-1] is not None
    assert one["skipped_steps"] == one["norms"].count(None)
    assert one["steps"] == len(one["norms"])


def test_a_sharded_teacher_gives_the_same_result_as_a_whole_one(folder: Path, results: dict[int, Any]) -> None:
    teacher = LocalFrozen(load_network(folder / "teacher"), CPU)
    batch = make_batch((9, 5), 3, packed=False)
    look = teacher.forward(batch, LogProbs).log_probs
    backend = LocalBackend(load_network(folder / "llama"), SETTINGS, CPU, learning_rate=RATE)
    distilled = train(backend, [step_batches(step, packed=False) for step in range(3)], Distil(teacher))
    evaluated = backend.evaluate(step_batches(0, packed=False), Sft())["gpt_loss"]
    here = backend.forward(batch, LogProbs).log_probs
    assert_same_training([rank["frozen"]["distilled"] for rank in results[2]], distilled)
    for rank in results[2]:
        found = rank["frozen"]
        assert_close(torch.tensor(found["look"]), look, rtol=0.0, atol=1e-5)
        assert_close(torch.tensor(found["forward"]), here, rtol=0.0, atol=1e-4)
        assert_close(torch.tensor(found["evaluated"]), torch.stack([evaluated.total, evaluated.count]).float())


def test_moving_the_shards_between_steps_changes_nothing(folder: Path, results: dict[int, Any], local: Local) -> None:
    backend, expected = local()
    assert_same_training([rank["moved"] for rank in results[2]], expected)
    assert_same_weights(folder / "moved.safetensors", backend)


def test_the_audit_finds_a_parameter_without_gradient(results: dict[int, Any]) -> None:
    for rank in results[2]:
        expected = "1 of 22 trainable parameters (model.layers.1.extra.weight) received no gradient"
        assert expected in rank["forgotten"]


def test_a_ring_trains_like_one_process(folder: Path, results: dict[int, Any], local: Local) -> None:
    backend, expected = local(packed=True)
    for rank in results[2]:
        assert_same_training([rank["ring"]], expected)
    assert_same_weights(folder / "ring.safetensors", backend)


@pytest.mark.parametrize("kind", ["full", "lora", "divided", "undivided"])
def test_two_ranks_resume_what_four_have_saved(kind: str, folder: Path, results: dict[int, Any], local: Local) -> None:
    backend, expected = local("qwen3_moe") if "divided" in kind else local(lora=kind == "lora")
    assert_same_training([rank["save"][kind] for rank in results[4]], expected)
    resumed = [rank["resume"][kind] for rank in results[2]]
    assert [one.pop("steps") for one in resumed] == [3, 3]
    assert_same_training(resumed, {key: values[1:] for key, values in expected.items()})
    assert_same_weights(folder / f"resumed-{kind}.safetensors", backend)


def test_one_rank_resumes_what_four_have_saved(folder: Path, results: dict[int, Any], local: Local) -> None:
    backend, expected = local()
    resumed = results[1][0]["resume_alone"]
    assert resumed.pop("steps") == 3
    assert_same_training([resumed], {key: values[1:] for key, values in expected.items()})
    assert_same_weights(folder / "resumed-alone.safetensors", backend)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_processes_that_divide_matrices_train_like_one_process(
    ranks: int, name: str, folder: Path, results: dict[int, Any], local: Local
) -> None:
    model, size, kwargs = CASES[ranks][name]
    backend, expected = local(model, **kwargs)
    found = [rank["split"][name] for rank in results[ranks]]
    peers = size * 2 if name == "ring" else size  # each has the losses of its rank
    assert [one["rank"] for one in found] == [[rank // peers, ranks // peers] for rank in range(ranks)]
    assert_same_training(found[::peers], expected)
    for rank in range(ranks):
        assert found[rank]["losses"] == pytest.approx(found[rank // peers * peers]["losses"], abs=1e-6)
        assert found[rank]["held"] < 1.1 * found[rank]["whole"] / ranks
    assert_same_weights(folder / f"split-{ranks}-{name}.safetensors", backend)


@pytest.mark.parametrize("ranks", [4, 2])
def test_all_ranks_reject_a_plan_that_omits_parameters(ranks: int, results: dict[int, Any]) -> None:
    for rank in results[ranks]:
        assert "--ds_tensor_parallel_size 2: processes have different gradients of model.layers." in rank["omitted"]
        assert "tensor-parallel plan of apertus omits it. Try: --ds_tensor_parallel_size 1" in rank["omitted"]


@pytest.mark.parametrize("name", ["full-split", "full-whole", "lora-split", "whole-split"])
def test_a_checkpoint_is_resumed_with_another_division(
    name: str, folder: Path, results: dict[int, Any], local: Local
) -> None:
    case = {"full": CASES[4]["packed-full"], "lora": CASES[4]["padded-lora"], "whole": ("llama", 2, {})}
    model, _, kwargs = case[name.partition("-")[0]]
    backend, expected = local(model, **kwargs)
    found = [rank["split_resumed"][name] for rank in results[2]]
    shares = found if name == "full-whole" else found[:1]
    assert_same_training(shares, {key: values[1:] for key, values in expected.items()})
    assert_same_weights(folder / f"split-resumed-{name}.safetensors", backend)


@pytest.mark.parametrize("ranks", [4, 2])
def test_each_rank_averages_its_shard(ranks: int, folder: Path, results: dict[int, Any]) -> None:
    """The average of four ranks, and the one that two ranks resume, are that of one process."""
    alone = LocalBackend(load_network(folder / "llama"), SETTINGS, CPU, learning_rate=RATE)
    expected = train_average(alone, [step_batches(step, packed=False) for step in range(3)]).tensors
    found = load_file(folder / f"average-{ranks}" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=0.0, atol=1e-5)
    whole = sum(tensor.numel() for tensor in expected.values())
    assert max(rank["average"] for rank in results[ranks]) < 1.1 * whole / ranks


def test_checkpoints_contain_no_pickles(folder: Path) -> None:
    files = sorted(path.name for path in (folder / "checkpoint-full" / FOLDER).iterdir())
    assert files == [*(f"rank{rank}.safetensors" for rank in range(4)), "shards.json"]


def test_checkpoints_that_do_not_fit_are_refused(results: dict[int, Any]) -> None:
    for rank in results[2]:
        missing, other = rank["refused"]
        assert "nowhere has no fsdp folder" in missing
        assert "model.lm_head.weight should have the shape nothing, got [" in other


def test_rows_of_divided_experts_are_divided_in_parts() -> None:
    parts = [Block.whole((6,)).divided(0, rank % 2, 2).divided(0, rank // 2, 2) for rank in range(4)]
    assert [list(part.ranges[0]) for part in parts] == [[0, 1], [3, 4], [2], [5]]


@pytest.mark.parametrize(("rows", "ranks"), [(7, 4), (1, 4), (8, 2), (3, 5)])
def test_rows_are_divided_as_in_torch(rows: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    blocks = [Block.whole((rows, 2)).divided(0, rank, ranks) for rank in range(ranks)]
    assert [list(block.ranges[0]) for block in blocks] == chunks + [[]] * (ranks - len(chunks))


def outputs_of(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(torch.arange(2, 12)[None]).logits


@pytest.mark.parametrize(
    ("name", "model"),
    [("4-packed-full", "llama"), ("tied", "tied"), ("experts", "mixtral"), ("split-2-padded-full", "qwen3")],
)
def test_exports_load_in_plain_transformers(name: str, model: str, folder: Path, local: Local) -> None:
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{name}", dtype=torch.float32)
    backend, _ = local(model, **({"with_aux_loss": True} if model == "mixtral" else {}))
    assert_close(outputs_of(exported), outputs_of(backend.network.decoder), rtol=0.0, atol=1e-4)


def test_adapters_are_exported_alone(folder: Path, local: Local) -> None:
    path = folder / "export-4-packed-lora"
    assert not list(path.glob("model*"))
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    exported = PeftModel.from_pretrained(base, path)
    assert_close(outputs_of(exported), outputs_of(local(lora=True)[0].network.model), rtol=0.0, atol=1e-4)
