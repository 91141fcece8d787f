"""Start the processes of a plan as Ray actors, and end all of them together, even after an error.

`launch` starts the worker groups, engines and pools of a training run, `inference.generate` only engines. The
watch ends a run if a worker process dies. Engines are not watched, because `EngineGroup` replaces them, nor are pools,
because a run can continue without them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from openrlhf.agents.build import agent_spec, reward_spec
from openrlhf.agents.sandbox.messages import WorkerSpec
from openrlhf.cluster.actors import ModelWorker
from openrlhf.cluster.calls import BACKGROUND, Process, ProcessWatch
from openrlhf.cluster.engine_nodes import start_on_nodes
from openrlhf.cluster.placement import Node
from openrlhf.cluster.pool_nodes import NodePool, PoolNode, digest_of, share_processes
from openrlhf.cluster.session import Cluster
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.config.commands import RLConfig
from openrlhf.config.worker_groups import GroupPlan
from openrlhf.errors import BackendError, ConfigError
from openrlhf.monitor import say
from openrlhf.rollout.engine_group import EngineGroup, EngineReplica
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm_peer import EnginePeer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINE_CALLS = 10_000  # concurrent calls per engine: it receives all requests immediately and schedules them itself
POOL_CALLS = 10_000  # concurrent calls per pool, which queues those that its processes have no room for
SECONDS_TO_LOAD_FILE = 600.0  # time limit for an actor and its first worker process, which loads the user's file


def actor_class(worker: type, background: int = 1) -> Any:
    """Return the Ray actor class of a worker, with threads for calls that must not wait for others."""
    import ray

    remote: Any = ray.remote  # Ray's annotations lack some of the options
    return remote(concurrency_groups={BACKGROUND: background})(worker)


@asynccontextmanager
async def open_starter(cluster: Cluster) -> AsyncIterator[ProcessStarter]:
    """Provide a `ProcessStarter`; the processes that it starts end with the context."""
    starter = ProcessStarter(cluster, ProcessWatch())
    try:
        async with cluster.head.needed():
            yield starter
    finally:
        starter.watch.stop()
        for task in starter.watching:
            task.cancel()
        for process in starter.processes:
            if cluster.head.lost:
                process.ask_to_exit()
            else:
                process.kill()


@dataclass(frozen=True)
class ProcessStarter:
    """Starter of a plan's processes, with a list of those it has started."""

    cluster: Cluster
    watch: ProcessWatch
    processes: list[Process[object]] = field(default_factory=list)
    watching: list[asyncio.Task[None]] = field(default_factory=list)  # tasks that watch the parts of engines

    async def start_group(self, group: GroupPlan, config: RLConfig, rollouts: int) -> WorkerGroup:
        """Start the processes of a group and wait until they have loaded their models."""
        actor = actor_class(ModelWorker, background=2)  # two threads: for `heartbeat` and for `exit`
        processes: list[Process[ModelWorker]] = [
            Process(actor.options(**slot.options).remote(), f"{group.name} {number}", slot.address).within(
                config.placement.worker_timeout, "--worker_timeout"
            )
            for number, slot in enumerate(self.cluster.group_slots(group))
        ]
        self.processes.extend(processes)
        for process in processes:
            self.watch.watch(process)
        starts = (
            process.call(ModelWorker.start, config, group, rollouts, number, os.getcwd())
            for number, process in enumerate(processes)
        )
        positions = await self.watch.guard(asyncio.gather(*starts))
        return WorkerGroup(group, processes, positions, self.watch)

    async def start_engines(self, spec: EngineSpec, *, max_restarts: int) -> EngineGroup:
        """Start the engines of the plan; `EngineGroup` also starts those that replace failed ones.

        Engines that share a GPU start one after the other: at startup, vLLM measures how much its own model takes.
        """
        actor, peer_actor = actor_class(EngineWorker), actor_class(EnginePeer)
        plans = self.cluster.plan.engines
        per_gpu = plans[0].per_gpu if plans else 1
        spec = spec.divided(per_gpu)

        turns = [asyncio.Lock() for _ in range(-(-len(plans) // per_gpu))]  # one for each GPU

        async def start(number: int) -> Process[EngineWorker]:
            async with turns[number // per_gpu]:
                return await start_now(number)

        async def start_now(number: int) -> Process[EngineWorker]:
            slots = self.cluster.engine_slots(number)
            # First, because processes on a lost node would be awaited until --engine_timeout.
            port = await asyncio.to_thread(self.cluster.find_port, slots) if len(slots) > 1 else 0
            first, *others = slots
            peers: tuple[Process[EnginePeer], ...] = tuple(
                Process(peer_actor.options(**slot.options).remote(), f"engine {number}, node {node}", slot.address)
                for node, slot in enumerate(others, 1)
            )
            handle = actor.options(**first.options, max_concurrency=ENGINE_CALLS).remote()
            process: Process[EngineWorker] = Process(
                handle, f"engine {number}", first.address, cancels=True, peers=peers
            )
            self.processes.append(process)
            starting = process.within(spec.engines.engine_timeout, "--engine_timeout")
            watching = await self.watch.guard(start_on_nodes(starting, peers, spec, number, os.getcwd(), port))
            if watching is not None:
                self.watching.append(watching)
            return process

        numbers = [plan.number for plan in plans]
        started = await asyncio.gather(*map(start, numbers))
        engines = [EngineReplica(number, process) for number, process in zip(numbers, started, strict=True)]
        return EngineGroup(engines, start, max_restarts, self.watch.guard)

    async def start_pools(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[NodePool]:
        """Start a pool for the reward function or the agent, if it is a file, on each other node that can run it."""
        import ray

        rewards = config.rewards
        spec = self._pool_spec(config, tokenizer)
        if spec is None or spec.code is not None:
            return []
        digest, folder = digest_of(spec.file), os.getcwd()
        here = ray.get_runtime_context().get_node_id()
        others = [node for node in self.cluster.nodes if node.id != here]
        _, *shares = share_processes(rewards.reward_processes, len(others) + 1)
        actor = actor_class(PoolNode)

        async def start(node: Node, share: int | None) -> NodePool | None:
            slot = self.cluster.node_slot(node)
            handle = actor.options(**slot.options, max_concurrency=POOL_CALLS).remote()
            process: Process[PoolNode] = Process(handle, f"{spec.kind}s", slot.address, cancels=True)
            self.processes.append(process)
            own = replace(rewards, reward_processes=share)
            try:
                started = await process.within(SECONDS_TO_LOAD_FILE).call(PoolNode.start, spec, own, digest, folder)
                return NodePool(process, *started, share or 0)
            except (ConfigError, BackendError) as error:
                say(f"{error.message}: this node is not used for {spec.name}")
                return None

        started = [start(node, share) for node, share in zip(others, shares, strict=True) if share != 0]
        return [pool for pool in await asyncio.gather(*started) if pool is not None]

    @staticmethod
    def _pool_spec(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> WorkerSpec | None:
        """Return the first message to workers, with an absolute path; None if the run has no code of the user."""
        if config.rollout.replay:
            return None
        if config.rewards.agent_func_path:
            return agent_spec(
                config.rewards,
                tokenizer,
                context_length=config.rollout.context_length,
                trust_remote_code=config.model.trust_remote_code,
                template=config.template,
            )
        return reward_spec(config.rewards) if config.rewards.reward_file else None
