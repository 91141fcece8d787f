"""GPU memory shared by processes through CUDA IPC, described by plain values instead of a pickle.

The sender of a weight channel puts the description of its buffer into the header of a bucket; the receiver opens it and
reads the same memory, so the bytes need not be sent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf.errors import RolloutError


@dataclass(frozen=True)
class SharedMemory:
    """Description of a buffer, from which another process can open it on the same GPU."""

    gpu: str  # its UUID: indices may differ between processes
    # Torch's own description: handle, size and offset of the allocation; handle and offset of the reference counter
    # that keeps the memory alive while it is mapped; handle of a CUDA event, and whether to wait for it before reading.
    storage: list[str | int]  # byte strings are in hexadecimal, for JSON


def check_allocator() -> None:
    """Reject expandable segments: their memory has no handle that another process could open."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise RolloutError(
                f"{name} enables expandable segments, which cannot be shared with an engine on the same GPU",
                try_this=f"an empty {name}, or engines on separate GPUs",
            )


def share_memory(buffer: Tensor) -> SharedMemory:
    """Describe a buffer for `open_memory` in one other process. Reuse it only after that process has released it."""
    storage: Any = buffer.untyped_storage()  # its type stub lacks this method
    _, *described = storage._share_cuda_()
    gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return SharedMemory(gpu, [value.hex() if isinstance(value, bytes) else value for value in described])


def open_memory(shared: SharedMemory) -> Tensor:
    """Open the sender's buffer, as bytes on this process's current device, which must be the same GPU."""
    device = torch.cuda.current_device()
    here = str(torch.cuda.get_device_properties(device).uuid)
    if here != shared.gpu:
        raise RolloutError(
            f"CUDA IPC shares weights only within one GPU: expected an engine on the trainer's GPU {shared.gpu},"
            f" got {here}"
        )
    torch.cuda.init()
    described = [bytes.fromhex(value) if isinstance(value, str) else value for value in shared.storage]
    storage = torch.UntypedStorage._new_shared_cuda(device, *described)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
