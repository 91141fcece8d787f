"""The cases of fsdp_worker.py in which processes divide the matrices of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import BackendError
from openrlhf.models.forward import Network
from openrlhf.training.fsdp import FsdpBackend
from openrlhf.training.fsdp_shards import local_shard
from openrlhf.types import Batch
from tests.models.architectures import build
from tests.training.deepspeed_cases import RATE, SETTINGS, of_rank, step_batches, train, train_average

if TYPE_CHECKING:
    from tests.training.fsdp_worker import Worker

CPU = torch.device("cpu")
# By number of processes and name: the model, the degree of tensor parallelism, and other options.
CASES: dict[int, dict[str, tuple[str, int, dict[str, Any]]]] = {
    4: {
        "packed-full": ("llama", 2, {"packed": True}),
        "padded-lora": ("qwen3", 2, {"lora": True}),
        "undivided-rows": ("many_heads", 4, {}),
        "ring": ("llama", 2, {"packed": True}),
    },
    2: {
        "padded-full": ("qwen3", 2, {}),
        "packed-lora": ("llama", 2, {"packed": True, "lora": True}),
        "read-late": ("tied", 2, {}),
    },
}
SAVED = {"full": "packed-full", "lora": "padded-lora"}  # cases that four processes also save after their first step


def split(size: int, *, ring: int = 1) -> ShardingFlags:
    return ShardingFlags(ds_tensor_parallel_size=size, ring_attn_size=ring)


def rows_of(worker: Worker, size: int, step: int, *, packed: bool = False, **_: Any) -> Sequence[Batch]:
    """Return the rows of this process, which its peers also get."""
    batches = step_batches(step, packed=packed)
    return batches if worker.ranks == size else of_rank(batches, worker.rank // size)


def train_cases(worker: Worker) -> dict[str, Any]:
    """Train each case, and save some."""
    results = {}
    for name, (model, size, kwargs) in CASES[worker.ranks].items():
        ring = 2 if name == "ring" else 1
        if name == "read-late":
            backend = FsdpBackend(worker.shell(model), SETTINGS, split(size), CPU, learning_rate=RATE)
        else:
            backend = worker.build(model, split(size, ring=ring), **kwargs)
        steps = [rows_of(worker, size * ring, step, **kwargs) for step in range(3)]
        found = train(backend, steps[:1])
        if name in SAVED.values():
            backend.save(worker.folder / f"split-{name}")
        after = train(backend, steps[1:], first=1)
        parameters = list(backend.network.parameters())
        results[name] = {key: found[key] + after[key] for key in found} | {
            "held": sum(local_shard(parameter).numel() for parameter in parameters),
            "whole": sum(parameter.numel() for parameter in parameters),
            "rank": [backend.rank, backend.data_parallel_size],
        }
        worker.keep_weights(backend, f"split-{worker.ranks}-{name}")
        backend.export(worker.folder / f"export-split-{worker.ranks}-{name}")
    return results


def omitted_case(worker: Worker) -> str:
    """Train a model whose plan omits the parameters of its activation function; return the complaint."""
    backend = FsdpBackend(Network(build("apertus")), SETTINGS, split(2), CPU, learning_rate=RATE)
    try:
        train(backend, [rows_of(worker, 2, 0)])
    except BackendError as error:
        return str(error)
    return "trained"


def resume_cases(worker: Worker) -> dict[str, Any]:
    """Resume, with and without tensor parallelism, from checkpoints that four processes saved with and without it."""
    results = {}
    checkpoints = {
        "full-split": ("split-packed-full", "llama", 2, {"packed": True}),
        "full-whole": ("split-packed-full", "llama", 1, {"packed": True}),
        "lora-split": ("split-padded-lora", "qwen3", 2, {"lora": True}),
        "whole-split": ("checkpoint-full", "llama", 2, {}),
    }
    for name, (checkpoint, model, size, kwargs) in checkpoints.items():
        backend = worker.build(model, split(size), **kwargs)
        backend.load(Path(worker.folder / checkpoint))
        results[name] = train(backend, [rows_of(worker, size, step, **kwargs) for step in (1, 2)], first=1)
        worker.keep_weights(backend, f"split-resumed-{name}")
    return results


def average_cases(worker: Worker) -> int:
    """Average the weights: four processes divide matrices and save, two resume; return the numbers held here."""
    written = worker.folder / "checkpoint-average"
    if worker.ranks == 4:
        steps = [rows_of(worker, 2, step) for step in range(3)]
        average = train_average(worker.build("llama", split(2)), steps, write=written)
    else:
        average = train_average(worker.build(), [worker.mine(step) for step in (1, 2)], resume=written)
    average.export(worker.folder / f"average-{worker.ranks}")
    return sum(tensor.numel() for tensor in average.tensors.values())
