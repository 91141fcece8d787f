"""The train_ppo and train_ppo_ray commands: choose the runtime and, if it is Ray, start models and engines on it.

`open_ray` is the counterpart of `rl.local.open_local`; the loop in `rl.train` is the same for both. `open_ray` plans
the placement, reserves the devices (`session`), starts the processes (`starter`) and connects the models' workers, the
engines and the weight sync between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.machine import machine_of
from openrlhf.cluster.placement import plan
from openrlhf.cluster.session import connect
from openrlhf.cluster.starter import open_starter
from openrlhf.cluster.weight_sync import PolicyRanks
from openrlhf.cluster.workers import RayWorkers
from openrlhf.config.checks.extras import require
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import resolve_runtime
from openrlhf.event_loop import mark_retrieved
from openrlhf.monitor import Sink, say
from openrlhf.plan.estimate import LOADING
from openrlhf.rl import train
from openrlhf.rl.engines import engine_spec
from openrlhf.rl.train import RLResult
from openrlhf.rl.workers import Runtime
from openrlhf.rollout.channel import Transport
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.group_sync import GroupSync
from openrlhf.rollout.sync_proof import SyncProof
from openrlhf.training.memory_check import check_memory, explain_memory
from openrlhf.training.preflight import explain_hardware


def run(config: RLConfig, sinks: Sequence[Sink] = ()) -> RLResult:
    """Train in one process or on a cluster, depending on --runtime; `sinks` receive every metric."""
    if resolve_runtime(config) == "local":
        return train.run(config, sinks=sinks)
    require("ray", "--runtime ray")
    return train.run(config, open_ray, sinks)


@asynccontextmanager
async def open_ray(config: RLConfig, tokenizer: PreTrainedTokenizerBase, rollouts: int) -> AsyncIterator[Runtime]:
    """Reserve devices and start the run's processes; all of them end with the context, even after an error.

    Engines that share devices with the models start first and have the devices to themselves until they are ready.
    """
    asked = plan(config)
    if config.rollout.replay:
        asked = replace(asked, engines=())
    per_gpu = asked.engines[0].per_gpu if asked.engines else 1
    sleeps, shares_devices = config.engines.vllm_enable_sleep, any(engine.shares for engine in asked.engines)
    folders = {"--ckpt_path": config.checkpoints.ckpt_path, "--save_path": config.checkpoints.save_path}
    with connect(asked, folders) as cluster:
        async with open_starter(cluster) as starter:
            explain_hardware(config, torch.device("cpu" if cluster.unit == "CPU" else "cuda"))
            machine = machine_of(cluster)
            check_memory(config, machine)
            say(f"starting {asked.describe()}")
            if per_gpu > 1 and cluster.unit == "GPU":
                say(f"{per_gpu} vLLM engines per GPU take turns, unless CUDA MPS runs on the nodes")
            starting_pools = mark_retrieved(asyncio.ensure_future(starter.start_pools(config, tokenizer)))
            starting_engines = starter.start_engines(engine_spec(config), max_restarts=config.engines.max_restarts)
            starting_groups = (starter.start_group(group, config, rollouts) for group in asked.groups)
            with explain_memory(config, LOADING, machine):
                if shares_devices:  # vLLM measures the free memory at startup, so the models must not be loaded yet
                    engines = await starting_engines
                    if sleeps:
                        await engines.apply(lambda process: process.call(EngineWorker.sleep))
                    groups = await asyncio.gather(*starting_groups)
                else:
                    engines, groups = await asyncio.gather(starting_engines, asyncio.gather(*starting_groups))

            # Send weights by CUDA IPC to engines on the policy's GPUs, by NCCL to engines on other GPUs, and by TCP on
            # CPUs.
            transport: Transport = "tcp"
            if cluster.unit == "GPU" and shares_devices:
                transport = "ipc"
            elif cluster.unit == "GPU" and config.engines.vllm_sync_backend != "gloo":
                transport = "nccl"
            workers = RayWorkers(groups)
            workers_per_engine = asked.engines[0].devices if asked.engines else 1
            sync = GroupSync(
                PolicyRanks(workers.policy, transport, workers_per_engine, per_gpu, workers.others),
                engines,
                sleeps=sleeps,
                drains=not config.asynchrony.partial_rollout,
                proof=SyncProof(config.engines.sync_check_every),
                workers_per_engine=workers_per_engine,
            )
            engines.send_weights = sync.resend
            yield Runtime(workers, engines, sync, machine, await starting_pools)
