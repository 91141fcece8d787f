"""The policy's side of a weight sync on a cluster: its ranks send to the engines (`rollout.group_sync`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from openrlhf.cluster.actors import ModelWorker
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel, Transport
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.group_sync import CHANNEL_TIMEOUT, LOOPBACK, Receiving


@dataclass(frozen=True)
class PolicyRanks:
    """The policy's ranks as senders of its weights.

    With CUDA IPC, each rank sends to the engine workers on its GPU. Otherwise the first rank of each node sends to a
    part of the engines, so that all nodes' network cards take part; every rank has all weights while they are gathered.
    """

    group: WorkerGroup
    transport: Transport
    workers_per_engine: int
    engines_per_gpu: int = 1
    others: Sequence[WorkerGroup] = ()  # the groups of all other models

    async def open_channels(self, machines: Mapping[int, Sequence[str]]) -> list[Receiving]:
        processes, senders = self.group.processes, self._choose_senders(machines)
        counts = Counter(chain.from_iterable(senders.values()))  # receivers, by rank of the sender
        channels: list[Channel | None] = [None] * len(processes)
        for rank, count in counts.items():
            own = processes[rank].address
            reached = {address for number, ranks in senders.items() if rank in ranks for address in machines[number]}
            host = LOOPBACK if reached == {own} else own
            channels[rank] = Channel(host, self.transport, count, timeout=CHANNEL_TIMEOUT)
        calls = (process.call(ModelWorker.open_channel, one) for process, one in zip(processes, channels, strict=True))
        opened = await self.group.watch.guard(asyncio.gather(*calls))
        numbers = {rank: iter(range(count)) for rank, count in counts.items()}
        found = ((opened[rank], next(numbers[rank])) for rank in chain.from_iterable(senders.values()))
        return [Receiving(channel, number) for channel, number in found if channel is not None]

    def _choose_senders(self, machines: Mapping[int, Sequence[str]]) -> dict[int, list[int]]:
        """Return the sending rank for each worker of each engine."""
        size = self.workers_per_engine
        if self.transport == "ipc":  # the worker's own GPU
            places = {number: number // self.engines_per_gpu * size for number in machines}
            return {number: list(range(first, first + size)) for number, first in places.items()}
        by_node: dict[str, int] = {}  # the first rank of each node
        for rank, process in enumerate(self.group.processes):
            by_node.setdefault(process.address, rank)
        load = Counter(dict.fromkeys(by_node.values(), 0))  # engines, by rank of the sender
        chosen: dict[int, list[int]] = {}
        for number, addresses in machines.items():
            rank = by_node.get(addresses[0], min(load, key=lambda one: load[one]))
            load[rank] += 1
            chosen[number] = [rank] * size
        return chosen

    async def send(self, version: int, *, verify: bool) -> Checksums:
        """Send the weights. Every rank takes part; those without a channel only help to gather."""
        calls = (process.call(ModelWorker.send, version, verify) for process in self.group.processes)
        sent = await self.group.watch.guard(asyncio.gather(*calls))
        return next(sums for sums in sent if sums or not verify)

    async def rest(self) -> None:
        await self.group.call_all(Models.rest)

    async def free_cache(self) -> None:
        await asyncio.gather(*(group.call_all(Models.free_cache) for group in (self.group, *self.others)))
