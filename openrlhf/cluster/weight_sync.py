"""The policy's side of a weight sync on a cluster: its ranks send to the engines (`rollout.group_sync`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.cluster.actors import ModelWorker
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel, Transport
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.group_sync import CHANNEL_TIMEOUT, LOOPBACK, Receiving


@dataclass(frozen=True)
class PolicyRanks:
    """The ranks of the policy as senders.

    With CUDA IPC, each rank sends to the engine workers on its GPU. Otherwise the first rank broadcasts to all of them.
    """

    group: WorkerGroup
    transport: Transport
    workers_per_engine: int
    engines_per_gpu: int = 1

    async def open_channels(self, addresses: Sequence[str]) -> list[Receiving]:
        receivers = self.workers_per_engine * len(addresses)
        size = self.engines_per_gpu if self.transport == "ipc" else receivers  # receivers of a channel
        senders = self.group.processes[: receivers // size]
        channels = [
            Channel(
                LOOPBACK if set(addresses) == {sender.address} else sender.address,
                self.transport,
                size,
                timeout=CHANNEL_TIMEOUT,
            )
            for sender in senders
        ]
        opening = (sender.call(ModelWorker.open_channel, one) for sender, one in zip(senders, channels, strict=True))
        opened = await self.group.watch.guard(asyncio.gather(*opening))
        return [Receiving(channel, number) for channel in opened for number in range(size)]

    async def send(self, version: int, *, verify: bool) -> Checksums:
        """Let every rank take part: those without a channel help to gather the weights."""
        calls = (process.call(ModelWorker.send, version, verify) for process in self.group.processes)
        sent = await self.group.watch.guard(asyncio.gather(*calls))
        return next(sums for sums in sent if sums or not verify)

    async def rest(self) -> None:
        await self.group.call_all(Models.rest)
