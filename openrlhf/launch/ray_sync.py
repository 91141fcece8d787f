"""Weights from the policy's processes to engines on a cluster: trainer and engines enter a sync together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openrlhf.launch.proof import compare
from openrlhf.launch.ray_calls import DeathError
from openrlhf.launch.ray_engines import RayEngines
from openrlhf.launch.ray_workers import WorkerGroup
from openrlhf.rollout.channel import Channel, Incoming, PerWorker, Transport
from openrlhf.rollout.engine import Checksums


class RaySync:
    """By CUDA IPC where an engine's worker shares a GPU with a rank of the policy, else from the first rank to all."""

    def __init__(
        self,
        policy: WorkerGroup,
        engines: RayEngines,
        transport: Transport,
        *,
        workers_per_engine: int,
        sleeps: bool,
        drains: bool,
        check_every: int,
    ) -> None:
        self.policy = policy
        self.engines = engines
        self.transport: Transport = transport
        self.workers_per_engine = workers_per_engine
        self.sleeps = sleeps
        self.drains = drains
        self.check_every = check_every
        self.syncs = 0
        self.channels: list[tuple[Channel, int]] = []  # channel and number of each receiver, engine by engine
        self.entering = asyncio.Lock()
        engines.after_restart = self.again

    async def sync(self, version: int) -> None:
        verify = self.syncs == 0 or (self.check_every > 0 and self.syncs % self.check_every == 0)
        await self._sync(version, drain=self.drains, verify=verify)
        self.syncs += 1

    async def again(self) -> None:
        """For an engine that was started anew. The others get what they have: nothing they draw changes."""
        await self._sync(self.engines.version, drain=False, verify=True)

    async def begin_training(self) -> None:
        if self.sleeps:
            await self.engines.sleep()

    async def _sync(self, version: int, *, drain: bool, verify: bool) -> None:
        async with self.entering:
            while self.engines.engines:
                try:
                    await self._send(version, drain=drain, verify=verify)
                    break
                except DeathError as death:
                    await self._replace_dead(death)
            if self.sleeps:
                await self.policy.everyone("do", "rest")
                await self.engines.wake("cache")
            await self.engines.resume()
            self.engines.homes.clear()
            self.engines.version = version

    async def _send(self, version: int, *, drain: bool, verify: bool) -> None:
        if not self.channels:
            await self._form()
        await self.engines.pause(drain=drain)
        if self.sleeps:
            await self.engines.wake("weights")
        sending = asyncio.ensure_future(self.policy.everyone("send", version, verify))
        try:
            received = await self.engines.receive(self._incoming(version), version, verify=verify)
            failures = [answer for answer in received if isinstance(answer, BaseException)]
            if failures:
                self.channels = []
                await asyncio.gather(sending, return_exceptions=True)  # it gives up by itself
                raise next((failure for failure in failures if isinstance(failure, DeathError)), failures[0])
            sent = next(sums for sums in await sending if sums or not verify)
        finally:
            sending.cancel()
        for engine, sums in zip(self.engines.engines, received, strict=True):
            compare(sent, as_checksums(sums), str(engine.process))

    async def _form(self) -> None:
        """Channels to the engines as they are now; a dead one's are not used again."""
        per_engine, engines = self.workers_per_engine, len(self.engines.engines)
        if self.transport == "ipc":
            senders = self.policy.processes[: per_engine * engines]
            made = await asyncio.gather(
                *(sender.call("open_channel", Channel("127.0.0.1", "ipc", 1)) for sender in senders)
            )
            self.channels = [(channel, 0) for channel in made]
            return
        first = self.policy.processes[0]
        asked = Channel(first.address, self.transport, per_engine * engines, timeout=SECONDS)
        channel = await first.call("open_channel", asked)
        self.channels = [(channel, number) for number in range(per_engine * engines)]

    def _incoming(self, version: int) -> Sequence[PerWorker]:
        arriving = [Incoming(channel, number, version) for channel, number in self.channels]
        size = self.workers_per_engine
        return [PerWorker(tuple(arriving[place : place + size])) for place in range(0, len(arriving), size)]

    async def _replace_dead(self, death: DeathError) -> None:
        for engine in self.engines.engines:
            try:
                await engine.process.call("do", "health")
            except DeathError:
                await self.engines.replace(engine, death)


def as_checksums(answer: Checksums | Exception) -> Checksums:
    assert not isinstance(answer, Exception)
    return answer


SECONDS = 60.0  # that a sender waits for an engine that may have died
