"""Checkpoints of sharded weights and optimizer states, which any number of processes can read.

Each process writes its rows of every tensor to a safetensors file of its own, and the first one also an index with the
full shapes. FSDP divides the rows of a tensor over the processes in order and as evenly as `torch.chunk`, so the rows
that a file holds follow from the number of processes. A process that resumes reads its own rows, from as many files as
they are spread over:

    saved by 4 processes     [ rank0 ][ rank1 ][ rank2 ][ rank3 ]
    resumed by 2             [     rank 0     ][     rank 1     ]

Neither format can contain code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from openrlhf.errors import BackendError

FOLDER = "fsdp"  # inside a checkpoint
INDEX = "shards.json"


def rows_of(rows: int, process: int, num_processes: int) -> range:
    """Return the rows that a process holds of a tensor with this many rows."""
    each = math.ceil(rows / num_processes)
    return range(min(each * process, rows), min(each * (process + 1), rows))


def save_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    *,
    process: int,
    num_processes: int,
) -> None:
    """Write this process's shards, named `slot/parameter`; `shapes` are the full shapes of the parameters."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), _file(target, process))
    if process == 0:
        index = {"processes": num_processes, "shapes": {name: list(shape) for name, shape in shapes.items()}}
        (target / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def load_shards(
    folder: Path, shapes: Mapping[str, Sequence[int]], *, process: int, num_processes: int
) -> dict[str, Tensor]:
    """Read the shards of this process from a checkpoint that any number of processes wrote."""
    source = folder / FOLDER
    if not source.is_dir():
        raise BackendError(
            f"{folder} has no {FOLDER} folder, so FSDP cannot resume from it",
            try_this="the --backend of the run that wrote it",
        )
    index = json.loads((source / INDEX).read_text(encoding="utf-8"))
    saved: dict[str, list[int]] = index["shapes"]
    for name in sorted(saved.keys() | shapes.keys()):
        expected, found = (list(known[name]) if name in known else "nothing" for known in (shapes, saved))
        if expected != found:
            raise BackendError(f"{folder}: {name} should have the shape {expected}, got {found}")
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(_file(source, one), "pt")) for one in range(index["processes"])]
        for key in sorted(opened[0].keys()):
            _, _, name = key.partition("/")
            if name not in saved or not opened[0].get_slice(key).get_shape():
                tensors[key] = opened[0].get_tensor(key)  # a number that all processes have in common
                continue
            mine = rows_of(saved[name][0], process, num_processes)
            parts = list(_read_rows(opened, key, saved[name][0], mine))
            tensors[key] = torch.cat(parts) if parts else opened[0].get_slice(key)[:0]
    return tensors


def _read_rows(opened: Sequence[Any], key: str, rows: int, wanted: range) -> Iterator[Tensor]:
    """Yield the wanted rows of a tensor from the files that hold them, in order."""
    for process, file in enumerate(opened):
        held = rows_of(rows, process, len(opened))
        first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if first < stop:
            yield file.get_slice(key)[first - held.start : stop - held.start]


def _file(folder: Path, process: int) -> Path:
    return folder / f"rank{process}.safetensors"
