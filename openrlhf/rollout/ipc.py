"""Memory of one GPU seen from two processes, described in plain numbers instead of a pickle."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from openrlhf.errors import RolloutError

Mapping = list[int | str | bool]


def check_allocator() -> None:
    """Memory in expandable segments has no handle that another process could open."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise RolloutError(
                f"{name} asks for expandable segments, which cannot be shared with an engine on the same GPU",
                try_this=f"{name}= (empty), or engines on GPUs of their own",
            )


def describe(buffer: Tensor) -> Mapping:
    """What `open_mapping` needs in another process, which must let go of it before the memory can be used anew."""
    storage: Any = buffer.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, wait = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return [uuid, handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), wait]


def open_mapping(mapping: Mapping) -> Tensor:
    """The sender's buffer, as bytes on this process's current device."""
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
