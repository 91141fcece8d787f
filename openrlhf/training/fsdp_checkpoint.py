"""Checkpoints of sharded weights and optimizer states, which any number of processes can read.

Each process writes its block of every tensor, with the position of the block, to its own safetensors file; the first
process also writes an index with the full shapes. FSDP divides the rows of a tensor over the processes in order and as
evenly as `torch.chunk`; before that, tensor parallelism divides rows or columns. On resume, each process reads its new
block from all files that contain a part of it:

    saved by 4 processes     [ rank0 ][ rank1 ][ rank2 ][ rank3 ]
    resumed by 2             [     rank 0     ][     rank 1     ]

Neither format can contain code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from openrlhf.errors import BackendError

INDEX = "shards.json"
STARTS = "starts"  # metadata of a file: where the block of each parameter starts


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor: the range that it covers in each dimension."""

    shape: tuple[int, ...]  # shape of the whole tensor
    ranges: tuple[range, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Block:
        return Block(tuple(shape), tuple(map(range, shape)))

    def divided(self, dimension: int, part: int, parts: int) -> Block:
        """Return a part of this block, divided as by `torch.chunk`."""
        ranges = list(self.ranges)
        each = math.ceil(len(ranges[dimension]) / parts)
        ranges[dimension] = ranges[dimension][each * part : each * (part + 1)]
        return replace(self, ranges=tuple(ranges))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this part of a whole tensor; if the block belongs to the flattened tensor, the tensor is flattened
        first.
        """
        return tensor.reshape(self.shape)[tuple(slice(one.start, one.stop) for one in self.ranges)]

    @property
    def size(self) -> list[int]:
        return [len(one) for one in self.ranges]


def save_shards(
    folder: Path, tensors: Mapping[str, Tensor], blocks: Mapping[str, Block], *, process: int, num_processes: int
) -> None:
    """Write this process's shards, named `slot/parameter`; `blocks` are its parts of the parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = {name: [one.start for one in block.ranges] for name, block in blocks.items()}
    save_file(dict(tensors), _file(folder, process), metadata={STARTS: json.dumps(starts)})
    if process == 0:
        index = {"processes": num_processes, "shapes": {name: block.shape for name, block in blocks.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def load_shards(folder: Path, blocks: Mapping[str, Block]) -> dict[str, Tensor]:
    """Read these blocks of the parameters from a checkpoint that any number of processes wrote."""
    if not folder.is_dir():
        raise BackendError(
            f"{folder.parent} has no {folder.name} folder to resume from",
            try_this="the --backend of the run that wrote it",
        )
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    saved: dict[str, list[int]] = index["shapes"]
    for name in sorted(saved.keys() | blocks.keys()):
        expected = list(blocks[name].shape) if name in blocks else "nothing"
        found = saved.get(name, "nothing")
        if expected != found:
            raise BackendError(
                f"{folder}: {name} should have the shape {expected}, got {found}",
                try_this="the --backend, --zero_stage and model of the run that wrote it",
            )
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(_file(folder, one), "pt")) for one in range(index["processes"])]
        starts = [json.loads(file.metadata()[STARTS]) for file in opened]
        for key in sorted(opened[0].keys()):
            _, _, name = key.partition("/")
            first = opened[0].get_slice(key)
            if name not in blocks or not first.get_shape():
                tensors[key] = opened[0].get_tensor(key)  # a value that is the same in all processes
                continue
            block = blocks[name]
            tensors[key] = first[tuple(slice(0, 0) for _ in block.shape)].new_empty(block.size)
            for file, known in zip(opened, starts, strict=True):
                _copy_common_part(file.get_slice(key), known[name], tensors[key], block)
    return tensors


class SavedTensor(Protocol):
    """A tensor in a safetensors file; indexing reads only the requested part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor: ...


def _copy_common_part(saved: SavedTensor, starts: Sequence[int], target: Tensor, block: Block) -> None:
    """Copy the overlap of a saved block, which begins at `starts`, into the target block."""
    there: list[slice] = []
    here: list[slice] = []
    for start, length, wanted in zip(starts, saved.get_shape(), block.ranges, strict=True):
        first, stop = max(start, wanted.start), min(start + length, wanted.stop)
        if first >= stop:
            return
        there.append(slice(first - start, stop - start))
        here.append(slice(first - wanted.start, stop - wanted.start))
    target[tuple(here)] = saved[tuple(there)]


def _file(folder: Path, process: int) -> Path:
    return folder / f"rank{process}.safetensors"
