"""Reinforcement learning on a cluster: Ray places the processes, and the same controller drives them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.launch.local_rl import Machinery
from openrlhf.launch.ray_calls import Fate, Process
from openrlhf.launch.ray_cluster import Cluster, connect
from openrlhf.launch.ray_engines import Engine, RayEngines
from openrlhf.launch.ray_placement import Group, Plan, plan
from openrlhf.launch.ray_sync import RaySync
from openrlhf.launch.ray_worker import EngineWorker, ModelWorker
from openrlhf.launch.ray_workers import RayWorkers, WorkerGroup
from openrlhf.monitor import say
from openrlhf.rollout.channel import Transport

ENGINE_CALLS = 10_000  # of one engine at a time: it is told everything at once and orders it by itself


@asynccontextmanager
async def open_ray(config: RLConfig, tokenizer: PreTrainedTokenizerBase, rollouts: int) -> AsyncIterator[Machinery]:
    """Everything that was started ends with it, whatever happened."""
    asked = plan(config)
    if config.rollout.replay:
        asked = replace(asked, engines=())
    with connect(config, asked) as cluster:
        fate = Fate()
        starting = Starting(cluster, config, rollouts, fate)
        try:
            yield await starting.machinery()
        finally:
            fate.forget()
            starting.kill_all()


class Starting:
    """Makes the processes of a plan, and knows all of them."""

    def __init__(self, cluster: Cluster, config: RLConfig, rollouts: int, fate: Fate) -> None:
        self.cluster = cluster
        self.config = config
        self.rollouts = rollouts
        self.fate = fate
        self.processes: list[Process] = []

    @property
    def plan(self) -> Plan:
        return self.cluster.plan

    async def machinery(self) -> Machinery:
        """Engines that sleep come first, and have the devices to themselves until they do."""
        say(f"starting {self.plan.describe()}")
        sleeps = self.config.engines.vllm_enable_sleep
        if sleeps:
            engines = await self.engines()
            await engines.sleep()
            groups = await self.groups()
        else:
            engines, groups = await asyncio.gather(self.engines(), self.groups())
        workers = RayWorkers(groups)
        assert workers.policy is not None
        sync = RaySync(
            workers.policy,
            engines,
            self.transport(),
            workers_per_engine=self.plan.engines[0].devices if self.plan.engines else 1,
            sleeps=sleeps,
            drains=not self.config.asynchrony.partial_rollout,
            check_every=self.config.engines.sync_check_every,
        )
        return Machinery(workers, engines, sync)

    def transport(self) -> Transport:
        if self.cluster.unit == "CPU":
            return "gloo"
        shared = any(engine.shares is not None for engine in self.plan.engines)
        return "ipc" if shared else "nccl"

    async def groups(self) -> list[WorkerGroup]:
        return list(await asyncio.gather(*(self.group(group) for group in self.plan.groups)))

    async def group(self, group: Group) -> WorkerGroup:
        import ray

        remote: Any = ray.remote  # its annotations know fewer options than it does
        actor = remote(concurrency_groups={"pulse": 1})(ModelWorker)
        processes = []
        for number, seat in enumerate(self.cluster.seats(group.name)):
            handle = actor.options(**seat.options).remote(self.config, group, self.rollouts, number)
            processes.append(Process(handle, f"{group.name} {number}", seat.address))
        self.processes += processes
        for process in processes:
            self.fate.depend_on(process)
        starts = asyncio.gather(*(process.call("start", os.getcwd()) for process in processes))
        return WorkerGroup(group, tuple(processes), tuple(await self.fate.race(starts)), self.fate)

    async def engines(self) -> RayEngines:
        started = await asyncio.gather(*(self.engine(seat.number) for seat in self.plan.engines))
        engines = [Engine(number, process) for number, process in enumerate(started)]
        return RayEngines(engines, self.engine, self.fate, max_restarts=self.config.engines.max_restarts)

    async def engine(self, number: int) -> Process:
        import ray

        seat = self.cluster.engine_seat(number)
        actor: Any = ray.remote(EngineWorker)
        handle = actor.options(**seat.options, max_concurrency=ENGINE_CALLS).remote(
            self.config, self.plan.engine, number
        )
        process = Process(handle, f"engine {number}", seat.address)
        self.processes.append(process)
        await self.fate.race(process.call("start", os.getcwd()))
        return process

    def kill_all(self) -> None:
        for process in self.processes:
            process.kill()
