"""Train under ZeRO-3 and write the results; started by the `deepspeed` launcher, or without one."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed as dist

from openrlhf.cli.entry import exit_launched_process
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.training.deepspeed import DeepSpeedBackend
from openrlhf.training.processes import start_distributed
from tests.training.deepspeed_cases import RATE, SETTINGS, load_network, of_rank, step_batches, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--universal", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    device = start_distributed(torch.device("cpu"))
    assert device == torch.device("cpu")
    network = load_network(args.folder / "llama")
    universal = args.universal is not None
    backend = DeepSpeedBackend(
        network, SETTINGS, ShardingFlags(zero_stage=3), device, learning_rate=RATE, universal_checkpoint=universal
    )
    if universal:
        backend.load(args.universal)
    steps = [step_batches(step, packed=False) for step in range(1 if universal else 0, 3)]
    if backend.data_parallel_size == 2:
        steps = [of_rank(batches, backend.rank) for batches in steps]
    seen = train(backend, steps, first=3 - len(steps)) | {
        "world": dist.get_world_size(),
        "local": os.environ["LOCAL_RANK"],
    }
    (args.folder / f"{args.name}-{backend.rank}.json").write_text(json.dumps(seen))
    exit_launched_process()


if __name__ == "__main__":
    main()
