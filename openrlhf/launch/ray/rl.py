"""Ray runtime of reinforcement learning: start models and engines on a cluster and connect them.

`open_ray` is the counterpart of `local_rl.open_local`; the same controller drives both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.launch.engines import engine_spec
from openrlhf.launch.explain import explain_hardware
from openrlhf.launch.local_rl import Machinery
from openrlhf.launch.proof import SyncProof
from openrlhf.launch.ray.cluster import Cluster, connect
from openrlhf.launch.ray.engines import RayEngines
from openrlhf.launch.ray.placement import plan
from openrlhf.launch.ray.start import Starting, started_on
from openrlhf.launch.ray.sync import RaySync
from openrlhf.launch.ray.workers import RayWorkers, WorkerGroup
from openrlhf.monitor import say
from openrlhf.rollout.channel import Transport


@asynccontextmanager
async def open_ray(config: RLConfig, tokenizer: PreTrainedTokenizerBase, rollouts: int) -> AsyncIterator[Machinery]:
    """Reserve devices and start the run's processes; all of them end with the context, even after an error."""
    asked = plan(config)
    if config.rollout.replay:
        asked = replace(asked, engines=())
    folders = {"--ckpt_path": config.checkpoints.ckpt_path, "--save_path": config.checkpoints.save_path}
    with connect(asked, folders) as cluster:
        async with started_on(cluster) as starting:
            explain_hardware(config, torch.device("cpu" if cluster.unit == "CPU" else "cuda"))
            say(f"starting {asked.describe()}")
            yield await start(starting, config, rollouts)


async def start(starting: Starting, config: RLConfig, rollouts: int) -> Machinery:
    """Start models and engines.

    Engines that share devices with the models start first and have the devices to themselves until they are ready.
    """
    sleeps = config.engines.vllm_enable_sleep
    cluster, seats = starting.cluster, starting.cluster.plan.engines

    async def start_engines() -> RayEngines:
        return await starting.engines(engine_spec(config), max_restarts=config.engines.max_restarts)

    async def start_groups() -> list[WorkerGroup]:
        starts = (starting.group(group, config, rollouts) for group in cluster.plan.groups)
        return list(await asyncio.gather(*starts))

    if any(seat.shares is not None for seat in seats):  # vLLM measures the free memory when it starts
        engines = await start_engines()
        if sleeps:
            await engines.sleep()
        groups = await start_groups()
    else:
        engines, groups = await asyncio.gather(start_engines(), start_groups())
    workers = RayWorkers(groups)
    assert workers.policy is not None
    sync = RaySync(
        workers.policy,
        engines,
        transport(cluster, config),
        workers_per_engine=seats[0].devices if seats else 1,
        sleeps=sleeps,
        drains=not config.asynchrony.partial_rollout,
        proof=SyncProof(config.engines.sync_check_every),
    )
    return Machinery(workers, engines, sync)


def transport(cluster: Cluster, config: RLConfig) -> Transport:
    """Return how weights travel to the engines.

    CUDA IPC if they share the policy's GPUs, NCCL if they have their own, gloo without GPUs or if --vllm_sync_backend
    asks for it.
    """
    if cluster.unit == "CPU":
        return "gloo"
    if any(engine.shares is not None for engine in cluster.plan.engines):
        return "ipc"
    return "gloo" if config.engines.vllm_sync_backend == "gloo" else "nccl"
