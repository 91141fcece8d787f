"""Weight sync on a cluster: send weights from the policy's processes to the engines.

The policy's workers send and the engines receive at the same time, over channels that are formed again whenever an
engine was replaced or a sync failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from openrlhf.cluster.calls import LOST, Process, abandon
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.errors import RolloutError
from openrlhf.rollout.channel import Channel, Transport
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.sync_proof import SyncProof, compare
from openrlhf.rollout.weight_receiver import IncomingWeights, WeightsPerWorker

SECONDS = 60.0  # timeout of both ends of a channel
SECONDS_TO_NOTICE = 2.0  # time for a sender to notice by itself that a receiver is gone, as it usually does


class RaySync:
    """Weight sync from the policy to all engines.

    With CUDA IPC, each rank of the policy sends to the engine worker that shares its GPU. Otherwise the first rank
    broadcasts to all engine workers.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        engines: RayEngines,
        transport: Transport,
        *,
        workers_per_engine: int,
        sleeps: bool,
        drains: bool,
        proof: SyncProof,
    ) -> None:
        self.policy = policy
        self.engines = engines
        self.transport: Transport = transport
        self.workers_per_engine = workers_per_engine
        self.sleeps = sleeps
        self.drains = drains
        self.proof = proof
        self.sent: Checksums = {}  # checksums of the last sync; empty if it was not verified
        self.channels: list[tuple[Channel, int]] = []  # channel and number of each receiver, engine by engine
        self.reached: list[Process] = []  # the engine processes that these channels connect to
        engines.bring_weights = self.again

    async def sync(self, version: int) -> None:
        """Send the policy's weights to all engines as `version`; failed engines are replaced."""
        verify = self.proof.is_due()
        async with self.engines.changing:
            await self._insist(lambda: self._bring(version, drain=self.drains, verify=verify))
        self.proof.conclude(self.sent)

    async def again(self) -> None:
        """Send the policy's current weights again, for an engine that was replaced.

        The other engines receive the weights they already have, or newer ones if the policy has trained since.
        """
        drain = self.drains and not self.sleeps  # if they take turns, the policy has not changed: no need to finish
        await self._insist(lambda: self._bring(self.engines.version, drain=drain, verify=True))

    async def begin_training(self) -> None:
        if self.sleeps:
            async with self.engines.changing:
                await self._insist(self.engines.sleep)

    async def end_training(self, version: int) -> None:
        if self.sleeps:
            await self.sync(version)

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work, replacing failed engines, until it succeeds; other errors are raised."""
        while True:
            try:
                return await work()
            except LOST:
                if self.sleeps:  # free the device's memory, which a new engine needs to start
                    await self.policy.everyone("do", "rest")
                if not await self.engines.replace_failed():
                    raise  # all engines are healthy, so it would fail again

    async def _bring(self, version: int, *, drain: bool, verify: bool) -> None:
        """Send the weights, then hand the devices over to the engines and let them generate."""
        if self.engines.engines:
            await self._send(version, drain=drain, verify=verify)
        if self.sleeps:
            await self.policy.everyone("do", "rest")
            await self.engines.wake("cache")
        await self.engines.resume()
        self.engines.homes.clear()
        self.engines.version = version

    async def _send(self, version: int, *, drain: bool, verify: bool) -> None:
        """Pause the engines and transfer the weights; with `verify`, compare checksums."""
        processes = [engine.process for engine in self.engines.engines]
        if self.reached != processes:
            await self._form()
        self.reached = []  # until this version has arrived, since failed channels cannot be used again
        await self.engines.pause(drain=drain)
        if self.sleeps:
            await self.engines.sleep()  # engines that are awake, such as new ones, make room for the policy
            await self.engines.wake("weights")
        sending = asyncio.ensure_future(self.policy.everyone("send", version, verify))
        receiving = [
            asyncio.ensure_future(process.call("load", weights, version, verify))
            for process, weights in zip(processes, self._incoming(version), strict=True)
        ]
        try:
            await asyncio.wait((sending, *receiving), return_when=asyncio.FIRST_EXCEPTION)
            await self._call_off_if_failed(sending, receiving)
            self.sent = next(sums for sums in sending.result() if sums or not verify)
        finally:
            abandon(sending, *receiving)
        self.reached = processes
        for process, received in zip(processes, receiving, strict=True):
            compare(self.sent, received.result(), str(process))

    async def _call_off_if_failed(
        self, sending: asyncio.Future[list[Checksums]], receiving: Sequence[asyncio.Future[Checksums]]
    ) -> None:
        """If a sender or receiver failed, cancel the transfer for the others, which wait for it, and raise its error.

        The error of a lost engine takes precedence, because it tells more than the timeouts of those that waited.
        """
        if all(work.done() and not work.exception() for work in (sending, *receiving)):
            return
        await asyncio.wait((sending,), timeout=SECONDS_TO_NOTICE)
        if sending.done() and (error := sending.exception()) and not isinstance(error, RolloutError):
            raise error  # a rank of the policy is gone, so the run cannot continue
        if not sending.done():
            for channel in {channel for channel, _ in self.channels}:
                asyncio.get_running_loop().run_in_executor(None, channel.call_off)  # slow if the sender is just ending
        ended = await asyncio.gather(sending, *receiving, return_exceptions=True)
        failures = [
            answer for answer in (*ended[1:], ended[0]) if isinstance(answer, BaseException)
        ]  # engines first: their errors tell more
        raise next((failure for failure in failures if isinstance(failure, LOST)), failures[0])

    async def _form(self) -> None:
        """Open new channels to the current engine processes; channels to dead ones are not used again."""
        per_engine, engines = self.workers_per_engine, len(self.engines.engines)
        if self.transport == "ipc":
            senders = self.policy.processes[: per_engine * engines]
            asked = [Channel(sender.address, "ipc", 1, timeout=SECONDS) for sender in senders]
            opened = (sender.call("open_channel", one) for sender, one in zip(senders, asked, strict=True))
            made = await self.policy.fate.race(asyncio.gather(*opened))
            self.channels = [(channel, 0) for channel in made]
            return
        first = self.policy.processes[0]
        wanted = Channel(first.address, self.transport, per_engine * engines, timeout=SECONDS)
        channel = await self.policy.fate.race(first.call("open_channel", wanted))
        self.channels = [(channel, number) for number in range(per_engine * engines)]

    def _incoming(self, version: int) -> Sequence[WeightsPerWorker]:
        """Return the receiving ends for this version, grouped by engine."""
        arriving = [IncomingWeights(channel, number, version) for channel, number in self.channels]
        size = self.workers_per_engine
        return [WeightsPerWorker(tuple(arriving[place : place + size])) for place in range(0, len(arriving), size)]
