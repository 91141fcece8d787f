"""Weight sync on a cluster: send weights from the policy's processes to the engines.

The policy's workers send and the engines receive at the same time over channels (`rollout.channel`). New channels are
opened after an engine was replaced or a sync failed. A failed engine is replaced by `RayEngines`, and the sync is
repeated; the failure of a policy rank ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from openrlhf.cluster.actors import EngineWorker, ModelWorker
from openrlhf.cluster.calls import LOST, DeathError, Process, cancel_all
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.errors import RolloutError
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel, Transport
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.sync_proof import SyncProof, compare
from openrlhf.rollout.weight_receiver import IncomingWeights, WeightsPerWorker

CHANNEL_TIMEOUT = 60.0  # seconds, at both ends of a channel
LOOPBACK = "127.0.0.1"  # address of a channel within one machine
SECONDS_TO_FAIL = 3 * CHANNEL_TIMEOUT  # time for all processes to report the failure of a transfer
SECONDS_TO_NOTICE = 2.0  # time for a sender to notice by itself that a receiver is gone


@dataclass
class RaySync:
    """Weight sync from the policy to all engines.

    With CUDA IPC, each rank of the policy sends to the engine worker that shares its GPU. Otherwise the first rank
    broadcasts to all engine workers.
    """

    policy: WorkerGroup
    engines: RayEngines
    transport: Transport
    workers_per_engine: int
    sleeps: bool  # engines sleep while the models train, because they share devices
    drains: bool  # running requests finish with the old weights before the sync
    proof: SyncProof
    sent: Checksums = field(default_factory=dict)  # checksums of the last sync; empty if it was not verified
    # The channel of each receiver and the receiver's number in it, engine by engine.
    channels: list[tuple[Channel, int]] = field(default_factory=list)
    connected: list[Process[EngineWorker]] = field(default_factory=list)  # engines that the channels connect to

    async def sync(self, version: int) -> None:
        """Send the policy's weights to all engines as `version`; failed engines are replaced."""
        verify = self.proof.is_due()
        async with self.engines.change_lock:
            await self._retry(lambda: self._deliver(version, drain=self.drains, verify=verify))
        self.proof.conclude(self.sent)

    async def resend(self) -> None:
        """Send the policy's current weights again, for an engine that was replaced.

        The other engines receive the weights they already have, or newer ones if the policy has trained since.
        """
        # If engines and training take turns, the weights are unchanged, so running requests need not finish first.
        drain = self.drains and not self.sleeps
        await self._retry(lambda: self._deliver(self.engines.version, drain=drain, verify=True))

    async def begin_training(self) -> None:
        if self.sleeps:
            async with self.engines.change_lock:
                await self._retry(lambda: self.engines.apply(lambda engine: engine.sleep()))

    async def end_training(self, version: int) -> None:
        if self.sleeps:
            await self.sync(version)

    async def _retry(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work, replacing failed engines, until it succeeds; other errors are raised."""
        while True:
            try:
                return await work()
            except LOST:
                if self.sleeps:  # free the device's memory, which a new engine needs to start
                    await self.policy.call_all(Models.rest)
                if not await self.engines.replace_failed():
                    raise  # all engines are healthy, so another attempt would fail, too

    async def _deliver(self, version: int, *, drain: bool, verify: bool) -> None:
        """Send the weights, then hand the devices over to the engines and let them generate."""
        if self.engines.engines:
            await self._send(version, drain=drain, verify=verify)
        if self.sleeps:
            await self.policy.call_all(Models.rest)
            await self.engines.apply(lambda engine: engine.wake("cache"))
        await self.engines.apply(lambda engine: engine.resume())
        self.engines.by_prefix.clear()
        self.engines.version = version

    async def _send(self, version: int, *, drain: bool, verify: bool) -> None:
        """Pause the engines and transfer the weights; with `verify`, compare checksums."""
        processes = [engine.process for engine in self.engines.engines]
        if self.connected != processes:
            await self._open_channels()
        self.connected = []  # reset until this version has arrived: channels of a failed transfer cannot be reused
        # No deadline: draining takes as long as the longest request, which the engine monitors.
        await self.engines.apply(lambda engine: engine.pause(drain=drain), seconds=None)
        if self.sleeps:
            # First put engines that are awake, such as new ones, to sleep: this frees memory for the policy.
            await self.engines.apply(lambda engine: engine.sleep())
            await self.engines.apply(lambda engine: engine.wake("weights"))
        senders = (process.call(ModelWorker.send, version, verify) for process in self.policy.processes)
        sending = asyncio.ensure_future(self.policy.watch.guard(asyncio.gather(*senders)))
        incoming = [IncomingWeights(channel, number, version) for channel, number in self.channels]
        size = self.workers_per_engine
        by_engine = [WeightsPerWorker(tuple(incoming[first : first + size])) for first in range(0, len(incoming), size)]
        receiving = [
            asyncio.ensure_future(process.call(EngineWorker.load, weights, version, verify))
            for process, weights in zip(processes, by_engine, strict=True)
        ]
        try:
            await asyncio.wait((sending, *receiving), return_when=asyncio.FIRST_EXCEPTION)
            if any(not work.done() or work.exception() for work in (sending, *receiving)):
                raise await self._failure(sending, receiving)
            self.sent = next(sums for sums in sending.result() if sums or not verify)
        finally:
            cancel_all(sending, *receiving)
        self.connected = processes
        for process, received in zip(processes, receiving, strict=True):
            compare(self.sent, received.result(), str(process))

    async def _failure(
        self, sending: asyncio.Future[list[Checksums]], receiving: Sequence[asyncio.Future[Checksums]]
    ) -> BaseException:
        """Cancel a failed transfer in all processes that still wait for it, and return the error to raise.

        The error of a lost engine takes precedence: it is more informative than the timeouts of the others.
        """
        await asyncio.wait((sending,), timeout=SECONDS_TO_NOTICE)
        if sending.done() and (error := sending.exception()) and not isinstance(error, RolloutError):
            return error  # a rank of the policy is gone, so the run cannot continue
        if not sending.done():
            for channel in {channel for channel, _ in self.channels}:
                # In a thread, because the call is slow if the sender is just ending.
                asyncio.get_running_loop().run_in_executor(None, channel.call_off)
        _, silent = await asyncio.wait((*receiving, sending), timeout=SECONDS_TO_FAIL)
        for engine, load in zip(self.engines.engines, receiving, strict=True):
            if load in silent:  # it hangs; otherwise the timeout of its channel would have ended it
                return DeathError(f"{engine.process} did not answer within {SECONDS_TO_FAIL:g} seconds")
        # Engines first: their errors are more informative.
        ended = await asyncio.gather(*receiving, sending, return_exceptions=True)
        failures = [answer for answer in ended if isinstance(answer, BaseException)]
        return next((failure for failure in failures if isinstance(failure, LOST)), failures[0])

    async def _open_channels(self) -> None:
        """Open new channels to the current engine processes; channels to dead processes are not reused."""
        receivers = self.workers_per_engine * len(self.engines.engines)
        # With ipc, open one channel per pair of processes that share a GPU; otherwise one from the first rank to all.
        senders = self.policy.processes[: receivers if self.transport == "ipc" else 1]
        size = 1 if self.transport == "ipc" else receivers
        addresses = {engine.process.address for engine in self.engines.engines}
        channels = [
            Channel(
                LOOPBACK if addresses == {sender.address} else sender.address,
                self.transport,
                size,
                timeout=CHANNEL_TIMEOUT,
            )
            for sender in senders
        ]
        opening = (sender.call(ModelWorker.open_channel, one) for sender, one in zip(senders, channels, strict=True))
        opened = await self.policy.watch.guard(asyncio.gather(*opening))
        self.channels = [(channel, number) for channel in opened for number in range(size)]
