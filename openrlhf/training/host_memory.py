"""A device's tensors, kept in host memory for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Takes tensors in and gives them back. Its memory is pinned, which is much faster, and is kept for next time."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[Tensor, Tensor]] = {}  # each tensor that was ever here, and its place
        self.inside: list[tuple[Tensor, Tensor, torch.device]] = []

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """What lies on a device; the rest stays as it is. Afterwards that memory is free for other processes."""
        for tensor in {id(tensor): tensor for tensor in tensors if tensor.device.type != "cpu"}.values():
            place = self._place(tensor)
            place.copy_(tensor.data, non_blocking=True)
            self.inside.append((tensor, place, tensor.device))
        if self.inside:
            torch.cuda.synchronize()
            for tensor, place, _ in self.inside:
                tensor.data = place
            torch.cuda.ipc_collect()  # buckets of a sync that its receiver has let go
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
