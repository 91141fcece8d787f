"""Temporary storage of device tensors in host memory, used while a training backend sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Move tensors to host memory and back. The buffers are pinned, for speed, and are kept for the next time."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[Tensor, Tensor]] = {}  # by id: each tensor stored so far, and its host buffer
        self.inside: list[tuple[Tensor, Tensor, torch.device]] = []  # (tensor, host buffer, device)

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors that are on a device to host memory and free their device memory for other processes."""
        for tensor in {id(tensor): tensor for tensor in tensors if tensor.device.type != "cpu"}.values():
            place = self._place(tensor)
            place.copy_(tensor.data, non_blocking=True)
            self.inside.append((tensor, place, tensor.device))
        if self.inside:
            torch.cuda.synchronize()
            for tensor, place, _ in self.inside:
                tensor.data = place
            torch.cuda.ipc_collect()  # frees weight-sync buckets that the receiver has released
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        for tensor, place, device in self.inside:
            tensor.data = place.to(device, non_blocking=True)
        if self.inside:
            torch.cuda.synchronize()
        self.inside.clear()

    def _place(self, tensor: Tensor) -> Tensor:
        known = self.places.get(id(tensor))
        if known is None or known[1].shape != tensor.shape:
            known = (tensor, torch.empty_like(tensor, device="cpu", pin_memory=True))
            self.places[id(tensor)] = known
        return known[1]
