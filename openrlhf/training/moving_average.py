"""An exponential moving average of a trained network (--enable_ema), kept in host memory in fp32.

Each process averages the part of the weights that it holds: its shard under FSDP and ZeRO-3, otherwise everything in
process 0. Nothing is gathered after an optimizer step; `export` gathers the average one tensor at a time. Checkpoints
have the format of `fsdp_checkpoint`, so any number of processes can resume.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from openrlhf.errors import BackendError
from openrlhf.training.backend import TrainBackend
from openrlhf.training.fsdp_checkpoint import Block, load_shards, save_shards

FOLDER = "ema"  # inside a checkpoint
WHOLE_FILE = "ema.safetensors"  # in checkpoints of version 1.0, instead of the folder
SLOT = "average"


class MovingAverage:
    """The average of a backend's weights; every process constructs it and makes the same calls."""

    def __init__(self, backend: TrainBackend, beta: float) -> None:
        self.backend = backend
        self.beta = beta  # decay
        self.tensors: dict[str, Tensor] = {}  # parts of the average that this process holds
        self.blocks: dict[str, Block] = {}
        for part in backend.parts():
            self.tensors[part.name] = in_host_memory(part.values)
            self.blocks[part.name] = part.block

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights; call after each optimizer step."""
        for part in self.backend.parts():
            self.tensors[part.name].lerp_(in_host_memory(part.values), 1.0 - self.beta)

    def save(self, folder: Path) -> None:
        """Write the parts of this process into a folder that all processes share."""
        if self.tensors:
            named = {f"{SLOT}/{name}": tensor.contiguous() for name, tensor in self.tensors.items()}
            place = {"process": self.backend.process, "num_processes": self.backend.num_part_holders}
            save_shards(folder / FOLDER, named, self.blocks, **place)

    def load(self, folder: Path) -> None:
        """Restore a saved average; the number of processes may differ."""
        if not self.tensors:
            return
        if (folder / WHOLE_FILE).is_file():
            whole = load_file(folder / WHOLE_FILE)
            self.tensors = {name: block.cut(whole[name]).clone() for name, block in self.blocks.items()}
        elif not (folder / FOLDER).is_dir():
            raise BackendError(
                f"{folder} has no moving average: the run that wrote it did not use --enable_ema",
                try_this="without --enable_ema, or start over in another --ckpt_path",
            )
        else:
            found = load_shards(folder / FOLDER, self.blocks)
            self.tensors = {name: found[f"{SLOT}/{name}"] for name in self.blocks}

    def export(self, folder: Path) -> None:
        """Write the average as a model folder for Transformers."""
        self.backend.export(folder, self.backend.joined(self.tensors))


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU in fp32; bf16 is too coarse for the small changes of a moving average."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
