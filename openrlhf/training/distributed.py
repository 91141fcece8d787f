"""Collective operations that are the same for every backend with several processes.

`DeepSpeedBackend` and `FsdpBackend` derive from `DistributedBackend`; they differ in how they shard a network. Every
process constructs the backend and makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.algo.reduce import Metrics, add_metrics, decode_metrics, encode_metrics
from openrlhf.models.export import save_model
from openrlhf.training.backend import TrainBackend
from openrlhf.training.processes import agree


class DistributedBackend(TrainBackend):
    """A network and its optimizer, spread over all processes of the launch."""

    group: dist.ProcessGroup | None  # all data-parallel ranks; None if these are all processes

    def join_ranks(self, group: dist.ProcessGroup | None) -> None:
        """Set the position of this process; `group` contains one process of each data-parallel rank (default: all)."""
        self.group = group
        self.rank, self.data_parallel_size = dist.get_rank(group), dist.get_world_size(group)
        self.process, self.num_processes = dist.get_rank(), dist.get_world_size()

    def most_rounds(self, count: int) -> int:
        return int(largest(count, self.device))

    def export(self, folder: Path, tensors: Iterator[tuple[str, Tensor]] | None = None) -> None:
        weights = {}
        for name, tensor in self.exported() if tensors is None else tensors:
            if self.process == 0:
                weights[name] = tensor.to("cpu", copy=True)
        try:
            if self.process == 0:
                save_model(self.network, folder, weights)
        finally:  # even after a failure, because the caller may retry in another folder
            self.barrier()

    def any_process(self, condition: bool) -> bool:
        return bool(largest(condition, self.device))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def barrier(self) -> None:
        dist.barrier()

    def agree(self, number: int) -> int:
        return agree(number, self.device)

    def sum_metrics(self, metrics: Metrics) -> Metrics:
        # Add in rank order. Names are sent with the values, because a rank with only fillers has no metrics.
        everyone = gather_bytes(encode_metrics(metrics), self.device, self.group)
        return add_metrics(map(decode_metrics, everyone))


def gather_bytes(own: bytes, device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of each process of the group, by rank; sent as tensors, because torch pickles objects."""
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.tensor(list(own.ljust(longest)), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everyone, padded, group=group)
    return [bytes(data[: int(length)].tolist()) for data, length in zip(everyone, lengths, strict=True)]


def largest(values: Tensor | float, device: torch.device) -> Tensor:
    """Return the elementwise maximum over all processes, on the CPU."""
    found = torch.as_tensor(values, dtype=torch.float64).to(device, copy=True)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.cpu()
