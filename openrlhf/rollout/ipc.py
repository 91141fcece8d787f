"""GPU memory shared by two processes through CUDA IPC, described by plain values instead of a pickle.

`channel.py` puts the description into the header of a bucket, which then need not be sent.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from openrlhf.errors import RolloutError

Mapping = list[int | str | bool]


def check_allocator() -> None:
    """Reject expandable segments: their memory has no handle that another process could open."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise RolloutError(
                f"{name} asks for expandable segments, which cannot be shared with an engine on the same GPU",
                try_this=f"{name}= (empty), or engines on GPUs of their own",
            )


def describe(buffer: Tensor) -> Mapping:
    """Return what `open_mapping` needs in another process. Reuse the memory only after that process released it."""
    storage: Any = buffer.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, wait = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return [uuid, handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), wait]


def open_mapping(mapping: Mapping) -> Tensor:
    """Open the sender's buffer, as bytes on this process's current device, which must be the same GPU."""
    fields: list[Any] = mapping
    uuid, handle, size, offset, counter, counter_offset, event, wait = fields
    device = torch.cuda.current_device()
    here = str(torch.cuda.get_device_properties(device).uuid)
    if here != uuid:
        raise RolloutError(f"the weights lie on GPU {uuid} and this process uses {here}; ipc needs one GPU for both")
    kind: Any = torch.UntypedStorage
    torch.cuda.init()
    storage = kind._new_shared_cuda(
        device,
        bytes.fromhex(handle),
        size,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
