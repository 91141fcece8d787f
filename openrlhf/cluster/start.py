"""Start the processes of a plan as Ray actors, and end all of them together, even after an error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openrlhf.cluster.actors import EngineWorker, ModelWorker
from openrlhf.cluster.calls import ASIDE, Fate, Process
from openrlhf.cluster.engines import Engine, RayEngines
from openrlhf.cluster.placement import Group
from openrlhf.cluster.session import Cluster
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.config.commands import RLConfig
from openrlhf.rollout.spec import EngineSpec

ENGINE_CALLS = 10_000  # concurrent calls per engine: it receives all requests immediately and schedules them itself


@asynccontextmanager
async def started_on(cluster: Cluster) -> AsyncIterator[Starting]:
    """Provide a `Starting`; the processes that it starts end with the context."""
    starting = Starting(cluster, Fate())
    try:
        async with cluster.head.needed():
            yield starting
    finally:
        starting.fate.forget()
        for process in starting.processes:
            if cluster.head.lost:
                process.dismiss()
            else:
                process.kill()


class Starting:
    """Starter of a plan's processes; it keeps track of all of them."""

    def __init__(self, cluster: Cluster, fate: Fate) -> None:
        self.cluster = cluster
        self.fate = fate
        self.processes: list[Process] = []

    async def group(self, group: Group, config: RLConfig, rollouts: int) -> WorkerGroup:
        """Start the processes of a group and wait until they have loaded their models."""
        import ray

        remote: Any = ray.remote  # its annotations lack some of its options
        actor = remote(concurrency_groups={ASIDE: 2})(ModelWorker)  # two threads: for `pulse` and for `leave`
        processes = []
        for number, seat in enumerate(self.cluster.seats(group.name)):
            handle = actor.options(**seat.options).remote(config, group, rollouts, number)
            processes.append(Process(handle, f"{group.name} {number}", seat.address))
        self.processes += processes
        for process in processes:
            self.fate.depend_on(process)
        starts = asyncio.gather(*(process.call("start", os.getcwd()) for process in processes))
        return WorkerGroup(group, tuple(processes), tuple(await self.fate.race(starts)), self.fate)

    async def engines(self, spec: EngineSpec, *, max_restarts: int) -> RayEngines:
        """Start all engines of the plan at the same time."""

        async def start(number: int) -> Process:
            return await self.engine(spec, number)

        started = await asyncio.gather(*(start(seat.number) for seat in self.cluster.plan.engines))
        engines = [Engine(number, process) for number, process in enumerate(started)]
        return RayEngines(engines, start, self.fate, max_restarts=max_restarts)

    async def engine(self, spec: EngineSpec, number: int) -> Process:
        """Start engine `number` and wait until it is ready; also used to replace a failed one."""
        import ray

        seat = self.cluster.engine_seat(number)
        remote: Any = ray.remote
        actor = remote(concurrency_groups={ASIDE: 1})(EngineWorker)
        handle = actor.options(**seat.options, max_concurrency=ENGINE_CALLS).remote(spec, number)
        process = Process(handle, f"engine {number}", seat.address, takes_back=True)
        self.processes.append(process)
        await self.fate.race(process.call("start", os.getcwd()))
        return process
