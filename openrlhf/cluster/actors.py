"""Worker processes of a run on a cluster: one rank of a model group, or one engine.

They are plain classes; `starter` turns them into Ray actors. The driver reaches them through `calls.Process`: it passes
a method of `Models` or of the engine, and the worker calls it on its own object.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from transformers.utils.logging import disable_progress_bar

from openrlhf.cluster.placement import GroupPlan
from openrlhf.config.commands import RLConfig
from openrlhf.models.load import load_tokenizer
from openrlhf.rl.build import build_models
from openrlhf.rl.engines import make_engine
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.engine import Checksums, LoadingEngine, Weights
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.weight_sender import WeightSender
from openrlhf.training.processes import choose_device, join
from openrlhf.training.rng import seed_dropout, seed_everything
from openrlhf.types import Completion, Request

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RankInfo:
    """Position of a process in its group."""

    rank: int  # data-parallel rank; tensor-parallel and ring peers share it, because they process the same rows
    data_parallel_size: int


class ModelWorker:
    """One process of a group: it holds its share of the group's models and executes the driver's calls in order."""

    models: Models
    sender: WeightSender | None = None

    def start(self, config: RLConfig, group: GroupPlan, rollouts: int, number: int, folder: str) -> RankInfo:
        """Join the group, load the models and return the position in it; `folder` is the driver's working folder."""
        enter(folder)
        sharding = config.sharding
        self.device = join(config)
        seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
        tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
        self.models = build_models(config, tokenizer, self.device, rollouts, roles=group.roles, rewards=group.rewards)
        gc.collect()
        gc.freeze()  # DeepSpeed collects garbage whenever states are offloaded: 0.4 s over all imported objects
        model = self.models.policy or self.models.critic
        if model is None:
            # Frozen models are not split by tensor parallelism, so each process gets its own rows; with ring
            # attention, however, they follow the layout of the trained models.
            ring = sharding.ring_attn_size
            peers = ring * sharding.ds_tensor_parallel_size if ring > 1 else 1
            return RankInfo(number // peers, group.size // peers)
        backend = model.backend
        seed_dropout(config.batches.seed, backend.process // sharding.ds_tensor_parallel_size)
        return RankInfo(backend.rank, backend.data_parallel_size)

    def apply(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        """Call a method of `Models` on this process's models."""
        return method(self.models, *arguments)

    def open_channel(self, channel: Channel) -> Channel:
        """Close the previous channel to the engines and open a new one."""
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(channel, self.device)
        return self.sender.channel

    def send(self, version: int, verify: bool) -> Checksums:
        """Send the policy's weights to the engines; a process without a channel only helps to gather them."""
        weights = iter(self.models.weights())
        try:
            return self.sender.send(weights, version, verify=verify) if self.sender is not None else {}
        finally:
            for _ in weights:  # all ranks must gather to the end, even if the channel failed
                pass

    def heartbeat(self) -> None:
        """Block forever, so that this call fails when the process dies and the driver notices."""
        threading.Event().wait()

    def exit(self) -> None:
        os._exit(0)


class EngineWorker:
    """One engine. If it serves a policy, requests wait for the policy's weights instead of using those on disk."""

    engine: LoadingEngine
    has_weights: asyncio.Event

    async def start(self, spec: EngineSpec, number: int, folder: str) -> None:
        """Load the model of engine `number`; `folder` is the driver's working folder."""
        enter(folder)
        self.has_weights = asyncio.Event()
        if not spec.awaits_weights:
            self.has_weights.set()
        tokenizer = load_tokenizer(str(spec.model.pretrain), spec.model)
        self.engine = make_engine(spec, tokenizer, choose_device(spec.model.device), number)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate once the engine has the policy's weights."""
        await self.has_weights.wait()
        return await self.engine.generate(requests)

    async def load(self, weights: Weights, version: int, verify: bool) -> Checksums:
        """Load the policy's weights and let waiting requests start."""
        checksums = await self.engine.load(weights, version, verify=verify)
        self.has_weights.set()
        return checksums

    async def apply(self, work: Callable[[LoadingEngine], Awaitable[None]]) -> None:
        """Apply a function to the engine, such as one that pauses it."""
        await work(self.engine)

    async def exit(self) -> None:
        os._exit(0)


def enter(folder: str) -> None:
    """Disable progress bars, and change to the driver's working folder if it exists, so that relative paths work."""
    disable_progress_bar()
    with suppress(FileNotFoundError):
        os.chdir(folder)
