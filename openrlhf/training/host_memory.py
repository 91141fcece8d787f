"""Storage of device tensors in host memory while a training backend sleeps or a frozen model is idle.

In a hybrid run, training and rollout engines take turns on a device. When a backend goes to sleep, `HostMemory` copies
its tensors to host buffers and frees the device memory for other processes; on waking, it copies them back. The tensor
objects stay the same, so optimizers and modules are not affected. `OffloadedWeights` does so for a frozen model, whose
weights never change and are therefore copied in one direction only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class HostMemory:
    """Host buffers to which tensors are moved and back; they are pinned for speed, and reused."""

    # Tensor id -> (tensor, host buffer). The reference to the tensor prevents reuse of its id.
    buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stored: list[tuple[Tensor, Tensor, torch.device]] = field(default_factory=list)  # (tensor, host buffer, device)

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors that are on a GPU to host memory, and free their device memory for other processes."""
        for tensor in {id(tensor): tensor for tensor in tensors if tensor.device.type != "cpu"}.values():
            known = self.buffers.get(id(tensor))
            if known is None or known[1].shape != tensor.shape:
                known = (tensor, torch.empty_like(tensor, device="cpu", pin_memory=True))
                self.buffers[id(tensor)] = known
            buffer = known[1]
            buffer.copy_(tensor.data, non_blocking=True)
            self.stored.append((tensor, buffer, tensor.device))
        if self.stored:
            torch.cuda.synchronize()
            for tensor, buffer, _ in self.stored:
                tensor.data = buffer
            torch.cuda.ipc_collect()  # frees weight-sync buckets that the receiver has released
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Move all stored tensors back to their devices."""
        for tensor, buffer, device in self.stored:
            tensor.data = buffer.to(device, non_blocking=True)
        if self.stored:
            torch.cuda.synchronize()
        self.stored.clear()


class OffloadedWeights:
    """Weights of a frozen model in pinned host memory; `load` copies them to the device, `release` frees them there."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        self.loaded = False
        self.host: list[tuple[Tensor, Tensor]] = []  # (tensor, its weights in host memory)
        for tensor in tensors:
            host = torch.empty_like(tensor.data, device="cpu", pin_memory=device.type == "cuda")
            self.host.append((tensor, host.copy_(tensor.data)))
            tensor.data = host  # one at a time, so that host memory never holds two copies of the model

    def load(self) -> None:
        for tensor, host in self.host:
            tensor.data = host.to(self.device, non_blocking=True)
        self.loaded = True

    def release(self) -> None:
        for tensor, host in self.host:
            tensor.data = host
        self.loaded = False
