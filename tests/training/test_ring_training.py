"""Four processes with ring attention train like one process, with any other kind of sharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.process_grid import process_grid
from tests.commands import run_processes, torchrun
from tests.tiny import make_model
from tests.training.deepspeed_cases import RATE, SETTINGS, Distil, load_network, step_batches, train
from tests.training.ring_worker import CASES

pytestmark = pytest.mark.slow(seconds=2)
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and the results of the four processes."""
    root = tmp_path_factory.mktemp("rings")
    for name, kind in {"llama": "llama", "mistral": "mistral", "mixtral": "mixtral"}.items():
        make_model(root / name, kind)
    make_model(root / "teacher", seed=3)
    run_processes([*torchrun(4), "-m", "tests.training.ring_worker", str(root)])
    return root


@pytest.fixture(scope="module")
def processes(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())


def assert_same_training(found: list[dict[str, Any]], name: str, expected: dict[str, Any]) -> None:
    """Check that norms and metrics agree in every process, and that the losses of the rings add up."""
    ranks = 1 if name in ("ring of four", "tensor parallel") else 2
    firsts = found[:: len(found) // ranks]
    shares = torch.tensor([first["losses"] for first in firsts])
    assert_close(shares.sum(0), torch.tensor(expected["losses"]), **CLOSE)
    for number, one in enumerate(found):
        assert one["losses"] == firsts[number * ranks // len(found)]["losses"]
        assert_close(torch.tensor(one["norms"]), torch.tensor(expected["norms"]), **CLOSE)
        assert_close(torch.tensor(one["metrics"]), torch.tensor(expected["metrics"]), **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_ring_ranks_train_like_one_process(name: str, folder: Path, processes: list[dict[str, Any]]) -> None:
    options = {key: value for key, value in CASES[name][1].items() if key != "recompute"}
    model = options.pop("model", "llama")
    backend = LocalBackend(load_network(folder / model, packed=True, **options), SETTINGS, CPU, learning_rate=RATE)
    expected = train(backend, [step_batches(step, packed=True) for step in range(3)])
    assert_same_training([one[name] for one in processes], name, expected)
    weights = load_file(folder / f"{name}.safetensors")
    for key, tensor in backend.weights():
        assert_close(weights[key], tensor, rtol=0.0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_a_teacher_uses_the_ring_too(folder: Path, processes: list[dict[str, Any]]) -> None:
    teacher = LocalFrozen(load_network(folder / "teacher", packed=True), CPU)
    backend = LocalBackend(load_network(folder / "llama", packed=True), SETTINGS, CPU, learning_rate=RATE)
    expected = train(backend, [step_batches(step, packed=True) for step in range(3)], Distil(teacher))
    assert_same_training([one["distilled"] for one in processes], "distilled", expected)


@pytest.mark.parametrize(("tensor", "ring", "data"), [(1, [2, 3], [1, 3, 5, 7]), (2, [1, 3], [3, 7])])
def test_neighbouring_ranks_form_a_ring(tensor: int, ring: list[int], data: list[int]) -> None:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        grid = process_grid.__wrapped__("cpu", ring=2, tensor=tensor)
        assert dist.get_process_group_ranks(grid["ring"].get_group()) == ring
        assert dist.get_process_group_ranks(grid["data"].get_group()) == data
    finally:
        dist.destroy_process_group()
