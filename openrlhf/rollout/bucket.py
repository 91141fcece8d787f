"""Many tensors in one flat buffer of bytes, and the header that says where each one lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the widest that a vectorised copy wants


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


@dataclass(frozen=True)
class Header:
    """What a receiver must know before the bytes of a bucket arrive, or that no more will."""

    entries: list[Entry] = field(default_factory=list)
    used: int = 0  # bytes
    mapping: list[int | str | bool] = field(default_factory=list)  # where the bytes lie, if they are not sent
    end: bool = False  # nothing follows
    failure: str = ""  # why nothing follows, where the weights are not complete

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Header:
        fields = json.loads(text)
        return cls(**fields | {"entries": [Entry(**entry) for entry in fields["entries"]]})


class Bucket:
    """A buffer being filled. A tensor that is larger than the bucket makes it grow, and then travels alone."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.buffer = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.clear()

    def clear(self) -> None:
        self.entries: list[Entry] = []
        self.used = 0

    def has_room(self, tensor: Tensor) -> bool:
        """An empty bucket has room for anything."""
        return not self.entries or self.used + _room(tensor) <= self.buffer.numel()

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies at once: the tensor may be gone when the next one is made."""
        end = self.used + _room(tensor)
        if end > self.buffer.numel():
            self.buffer = self.buffer.new_empty(end)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.buffer[self.used : self.used + data.numel()].copy_(data)
        self.entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used))
        self.used = end


def unpack(header: Header, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views into the buffer."""
    for entry in header.entries:
        dtype: torch.dtype = vars(torch)[entry.dtype]
        size = prod(entry.shape) * dtype.itemsize
        yield entry.name, buffer[entry.offset : entry.offset + size].view(dtype).view(entry.shape)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
