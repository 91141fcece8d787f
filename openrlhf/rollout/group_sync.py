"""Weight sync from a policy to a group of engines in other processes.

The policy's side sends and the engines receive at the same time over channels (`channel.py`). New channels are opened
after an engine was replaced or a sync failed. A failed engine is replaced by `EngineGroup`: if it fails during a sync,
the sync is repeated; otherwise only the new engine receives weights, and the others keep generating. A failure of the
policy's side ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from openrlhf.errors import DeathError, RolloutError
from openrlhf.event_loop import cancel_all
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.engine_group import LOST, EngineGroup, EngineReplica
from openrlhf.rollout.engine_worker import EngineProcess, EngineWorker
from openrlhf.rollout.sync_proof import SyncProof, compare
from openrlhf.rollout.weight_receiver import IncomingWeights, WeightsPerWorker

CHANNEL_TIMEOUT = 60.0  # seconds, at both ends of a channel
LOOPBACK = "127.0.0.1"  # address of a channel between processes of one machine
SECONDS_TO_FAIL = 3 * CHANNEL_TIMEOUT  # time for all processes to report the failure of a transfer
SECONDS_TO_NOTICE = 2.0  # time for a sender to notice by itself that a receiver is gone


class Receiving(NamedTuple):
    """A channel, and the number of one receiver in it."""

    channel: Channel
    number: int


class PolicySide(Protocol):
    """The sending side of a sync: the processes that hold the policy."""

    async def open_channels(self, machines: Mapping[int, Sequence[str]]) -> list[Receiving]:
        """Close the previous channels and open new ones; `machines` has the addresses of each engine, by its number.

        Return the receivers, engine by engine; an engine may have several (`GroupSync.workers_per_engine`).
        """
        ...

    async def send(self, version: int, *, verify: bool) -> Checksums:
        """Send the policy's weights over all channels; return their checksums if `verify`, else an empty mapping."""
        ...

    async def rest(self) -> None:
        """Move the policy off its devices, if it sleeps while engines generate."""
        ...

    async def free_cache(self) -> None:
        """Free the memory that PyTorch caches on the devices, so that engines have room to wake up."""
        ...


@dataclass
class GroupSync:
    """Weight sync from the policy to all engines of a group."""

    policy: PolicySide
    engines: EngineGroup
    sleeps: bool  # engines sleep while the models train, because they share devices
    drains: bool  # running requests finish with the old weights before the sync
    proof: SyncProof
    workers_per_engine: int = 1  # receivers per engine
    sent: Checksums = field(default_factory=dict)  # checksums of the last sync; empty if it was not verified
    receivers: list[Receiving] = field(default_factory=list)  # engine by engine
    connected: list[EngineProcess] = field(default_factory=list)  # engines that the channels connect to

    async def sync(self, version: int) -> None:
        """Send the policy's weights to all engines as `version`; failed engines are replaced."""
        verify = self.proof.is_due()
        async with self.engines.change_lock:
            await self._retry(lambda: self._deliver(self.engines.engines, version, drain=self.drains, verify=verify))
        self.proof.conclude(self.sent)

    async def resend(self) -> None:
        """Send the policy's current weights to engines that were replaced, while the others keep generating.

        In an asynchronous run, these may be newer than the weights of the other engines. If the engines share devices
        with the models, there is room for the policy only while all of them sleep, so all of them receive the weights.
        In that case, they are the weights of the last sync, so running requests need not finish first.
        """
        await self._retry(
            lambda: self._deliver(
                [engine for engine in self.engines.engines if self.sleeps or not engine.ready],
                self.engines.version,
                drain=False,
                verify=True,
            )
        )

    async def begin_training(self) -> None:
        if self.sleeps:
            async with self.engines.change_lock:
                await self._retry(lambda: self.engines.apply(lambda process: process.call(EngineWorker.sleep)))

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
                    await self.policy.rest()
                if not await self.engines.replace_failed():
                    raise  # all engines are healthy, so another attempt would also fail

    async def _deliver(self, to: Sequence[EngineReplica], version: int, *, drain: bool, verify: bool) -> None:
        """Send the weights to some engines, hand the devices over to them and let them generate."""
        if to:
            await self._send(to, version, drain=drain, verify=verify)
        if self.sleeps:
            await self.policy.rest()
            await self.policy.free_cache()
            await self.engines.apply(lambda process: process.call(EngineWorker.wake, "cache"), to)
        await self.engines.apply(lambda process: process.call(EngineWorker.resume), to)
        for engine in to:
            engine.ready = True
        if len(to) == len(self.engines.engines):
            self.engines.forget_caches()
        self.engines.version = version

    async def _send(self, to: Sequence[EngineReplica], version: int, *, drain: bool, verify: bool) -> None:
        """Pause the engines and transfer the weights; with `verify`, compare checksums."""
        processes = [engine.process for engine in to]
        if self.connected != processes:
            self.receivers = await self.policy.open_channels({engine.number: engine.process.machines for engine in to})
        self.connected = []  # reset until this version has arrived: channels of a failed transfer cannot be reused
        # No deadline: draining takes as long as the longest request, which the engine monitors.
        await self.engines.apply(lambda process: process.call(EngineWorker.pause, drain=drain), to, seconds=None)
        if self.sleeps:
            # First put engines that are awake, such as new ones, to sleep: this frees memory for the policy.
            await self.engines.apply(lambda process: process.call(EngineWorker.sleep), to)
            await self.policy.free_cache()
            await self.engines.apply(lambda process: process.call(EngineWorker.wake, "weights"), to)
        sending = asyncio.ensure_future(self.policy.send(version, verify=verify))
        incoming = [IncomingWeights(channel, number, version) for channel, number in self.receivers]
        size = self.workers_per_engine
        by_engine = [WeightsPerWorker(tuple(incoming[first : first + size])) for first in range(0, len(incoming), size)]
        receiving = [
            asyncio.ensure_future(process.call(EngineWorker.load, weights, version, verify))
            for process, weights in zip(processes, by_engine, strict=True)
        ]
        transfers = (sending, *receiving)
        try:
            await asyncio.wait(transfers, return_when=asyncio.FIRST_EXCEPTION)
            if any(not work.done() or work.exception() for work in transfers):
                raise await self._failure(sending, receiving, processes)
            self.sent = sending.result()
        finally:
            cancel_all(*transfers)
        self.connected = processes
        for process, received in zip(processes, receiving, strict=True):
            compare(self.sent, received.result(), str(process))

    async def _failure(
        self,
        sending: asyncio.Future[Checksums],
        receiving: Sequence[asyncio.Future[Checksums]],
        processes: Sequence[EngineProcess],
    ) -> BaseException:
        """Cancel a failed transfer in all processes that still wait for it, and return the error to raise.

        The error of a lost engine takes precedence: it is more informative than the timeouts of the others.
        """
        await asyncio.wait((sending,), timeout=SECONDS_TO_NOTICE)
        if sending.done() and (error := sending.exception()) and not isinstance(error, RolloutError):
            return error  # the policy's side is gone, so the run cannot continue
        if not sending.done():
            for channel in {receiver.channel for receiver in self.receivers}:
                # In a thread, because the call is slow if the sender is about to end.
                asyncio.get_running_loop().run_in_executor(None, channel.call_off)
        _, silent = await asyncio.wait((*receiving, sending), timeout=SECONDS_TO_FAIL)
        for process, load in zip(processes, receiving, strict=True):
            if load in silent:  # it hangs; otherwise the timeout of its channel would have ended it
                return DeathError(f"{process} did not answer within {SECONDS_TO_FAIL:g} seconds")
        # Engines first: their errors are more informative.
        ended = await asyncio.gather(*receiving, sending, return_exceptions=True)
        failures = [answer for answer in ended if isinstance(answer, BaseException)]
        return next((failure for failure in failures if isinstance(failure, LOST)), failures[0])
