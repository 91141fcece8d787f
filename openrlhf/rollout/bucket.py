"""Buckets: many tensors packed into one flat byte buffer, with a header that locates each of them.

A weight channel (channel.py) sends buckets, so that a model is sent in a few large messages instead of one per tensor.
The sender fills a `Bucket`; the receiver calls `unpack` with the header and the received buffer.

    buffer  | embed.weight ........ | pad | layers.0.q.weight ... | pad | layers.0.q.bias | pad | unused
            ^ offset 0                    ^ offset, a multiple of 16                            ^ used
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from math import prod

import torch
from torch import Tensor

from openrlhf.rollout.ipc import SharedMemory

ALIGNMENT = 16  # bytes; enough for vectorised copies
# Bytes of a bucket: large ones for large models, because the sender has work for each bucket and receiver.
MIN_BUCKET, USUAL_BUCKET, MAX_BUCKET = 1 << 26, 1 << 28, 1 << 30
BUCKETS_PER_MODEL = 16  # minimum, so that filling and sending overlap
MEMORY_SHARE = 8  # a bucket takes at most this part of the free memory; the sender has two


@dataclass(frozen=True)
class Entry:
    """Name, type, shape and position of one tensor in a bucket."""

    name: str
    dtype: str  # without the "torch." prefix
    shape: list[int]
    offset: int  # bytes


@dataclass(frozen=True)
class Header:
    """Description of a bucket, sent before its bytes, or a notice that no more buckets follow."""

    version: int  # version of the weights
    entries: list[Entry] = field(default_factory=list)
    used: int = 0  # bytes
    shared: SharedMemory | None = None  # location of the bytes, if they are not sent
    end: bool = False  # no more buckets follow
    failure: str = ""  # why the weights are incomplete; empty if they are complete

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """Parse the JSON of `encode`. The format is not pickle, because a pickle from the network could run code."""
        fields = json.loads(text)
        entries = [Entry(**entry) for entry in fields["entries"]]
        shared = SharedMemory(**fields["shared"]) if fields["shared"] else None
        return cls(**fields | {"entries": entries, "shared": shared})


@dataclass
class Bucket:
    """A byte buffer to fill. If a tensor is larger than the buffer, the buffer grows and the tensor is sent alone."""

    buffer: Tensor  # [bytes]
    entries: list[Entry] = field(default_factory=list)
    used: int = 0  # bytes

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor into the buffer; return False if it does not fit.

        An empty bucket accepts any tensor. The copy is made immediately, because the tensor may be freed when the next
        one is produced.
        """
        end = self.used + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT  # rounded up
        if end > self.buffer.numel():
            if self.entries:
                return False
            self.buffer = self.buffer.new_empty(end)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # [bytes of the tensor]
        self.buffer[self.used : self.used + data.numel()].copy_(data)
        self.entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used))
        self.used = end
        return True


def unpack(header: Header, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs; the tensors are views into the buffer."""
    for entry in header.entries:
        dtype: torch.dtype = vars(torch)[entry.dtype]
        size = prod(entry.shape) * dtype.itemsize
        yield entry.name, buffer[entry.offset : entry.offset + size].view(dtype).view(entry.shape)


def bucket_size(limit: int, model_bytes: int, free_bytes: Collection[int]) -> int:
    """Return the bytes of a bucket for a model, 0 if its size is not known yet.

    `free_bytes` has one entry for each GPU that holds a bucket. A tensor that is larger than a bucket is sent
    alone (`Bucket.add`).
    """
    wanted = min(MAX_BUCKET, max(USUAL_BUCKET, model_bytes // BUCKETS_PER_MODEL))
    room = max(MIN_BUCKET, min(free_bytes) // MEMORY_SHARE) if free_bytes else wanted
    return min(limit, wanted, room)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that PyTorch can still allocate on a GPU; None for host memory, which is assumed to suffice."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
