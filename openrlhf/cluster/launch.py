"""The train_ppo and train_ppo_ray commands: choose the runtime, and start models and engines on Ray if it is Ray.

`open_ray` is the counterpart of `rl.local.open_local`; the loop in `rl.train` does not know which one it runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.placement import plan
from openrlhf.cluster.session import Cluster, connect
from openrlhf.cluster.start import Starting, started_on
from openrlhf.cluster.weight_sync import RaySync
from openrlhf.cluster.workers import RayWorkers, WorkerGroup
from openrlhf.config.checks.extras import require
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import resolve_runtime
from openrlhf.monitor import say
from openrlhf.rl import train
from openrlhf.rl.engines import engine_spec
from openrlhf.rl.local import Machinery
from openrlhf.rl.train import RLResult
from openrlhf.rollout.channel import Transport
from openrlhf.rollout.sync_proof import SyncProof
from openrlhf.training.explain import explain_hardware


def run(config: RLConfig) -> RLResult:
    """Train in one process or on a cluster, as --runtime says."""
    if resolve_runtime(config) == "local":
        return train.run(config)
    require("ray", "--runtime ray")
    return train.run(config, open_ray)


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
