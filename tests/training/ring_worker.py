"""One of four processes that train with ring attention in several layouts, for test_ring_training.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.training.deepspeed import DeepSpeedBackend, DeepSpeedFrozen
from openrlhf.training.processes import start_distributed
from tests.training.deepspeed_cases import RATE, SETTINGS, Distil, load_network, of_rank, step_batches, train

CPU = torch.device("cpu")
RING = {"ring_attn_size": 2}
CASES: dict[str, tuple[ShardingFlags, dict[str, Any]]] = {
    "zero2": (ShardingFlags(zero_stage=2, **RING), {}),
    "zero3": (ShardingFlags(zero_stage=3, ring_head_stride=2, **RING), {}),
    "zero0": (ShardingFlags(zero_stage=0, **RING), {}),
    "lora": (ShardingFlags(zero_stage=2, **RING), {"lora": True}),
    "ring of four": (ShardingFlags(zero_stage=2, ring_attn_size=4), {}),
    "window": (ShardingFlags(zero_stage=3, **RING), {"model": "mistral"}),
    "experts": (ShardingFlags(zero_stage=3, **RING), {"model": "mixtral", "with_aux_loss": True}),
    "recomputed": (ShardingFlags(zero_stage=3, **RING), {"recompute": True}),
    # Last, because DeepSpeed applies it to all models that follow.
    "tensor parallel": (ShardingFlags(zero_stage=2, ds_tensor_parallel_size=2, **RING), {}),
}


def own_batches(backend: DeepSpeedBackend) -> list[list[Any]]:
    """Return the micro-batches of this data-parallel rank: all if it is the only one, otherwise its share."""
    steps = [step_batches(step, packed=True) for step in range(3)]
    return steps if backend.data_parallel_size == 1 else [of_rank(batches, backend.rank) for batches in steps]


def train_case(folder: Path, name: str) -> tuple[DeepSpeedBackend, dict[str, Any]]:
    sharding, options = CASES[name]
    options = dict(options)
    model, recompute = options.pop("model", "llama"), options.pop("recompute", False)
    network = load_network(folder / model, packed=True, **options)
    if recompute:
        network.decoder.gradient_checkpointing_enable({"use_reentrant": False})
    backend = DeepSpeedBackend(network, SETTINGS, sharding, CPU, learning_rate=RATE)
    return backend, train(backend, own_batches(backend))


def distil(folder: Path) -> dict[str, Any]:
    """Distil from a sharded teacher that uses the ring too."""
    sharding = ShardingFlags(zero_stage=3, **RING)
    teacher = DeepSpeedFrozen(load_network(folder / "teacher", packed=True), sharding, CPU)
    backend = DeepSpeedBackend(load_network(folder / "llama", packed=True), SETTINGS, sharding, CPU, learning_rate=RATE)
    return train(backend, own_batches(backend), Distil(teacher))


def main(folder: Path) -> None:
    start_distributed(CPU)
    results: dict[str, Any] = {"distilled": distil(folder)}
    for name in CASES:
        backend, results[name] = train_case(folder, name)
        kept = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in backend.weights()}
        if dist.get_rank() == 0:
            save_file(kept, folder / f"{name}.safetensors")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
