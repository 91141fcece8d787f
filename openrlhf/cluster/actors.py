"""Worker processes of a run on a cluster: one rank of a model group, or one engine.

They are plain classes; `start` turns them into Ray actors.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.utils.logging import disable_progress_bar

from openrlhf.cluster.placement import Group
from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.load import load_tokenizer
from openrlhf.rl.build import build_models
from openrlhf.rl.engines import make_engine
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.engine import Checksums, Weights
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.weight_sender import WeightSender
from openrlhf.training.device import choose_device, seed_dropout, seed_everything
from openrlhf.training.distributed import join
from openrlhf.types import Completion, Request


@dataclass(frozen=True)
class Standing:
    """Position of a process in its group; tensor-parallel and ring peers share a data-parallel rank."""

    process: int
    rank: int
    data_parallel_size: int


class ModelWorker:
    """One process of a group: it holds its share of the group's models and executes the driver's calls in order."""

    def __init__(self, config: RLConfig, group: Group, rollouts: int, number: int) -> None:
        self.config = config
        self.group = group
        self.rollouts = rollouts
        self.number = number
        self.models = Models()
        self.sender: WeightSender | None = None

    def start(self, folder: str) -> Standing:
        """Join the group, load the models and return this process's position; `folder` is the driver's."""
        settle_in(folder)
        config = self.config
        device = join(config)
        seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
        tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
        self.models = build_models(
            config, tokenizer, device, self.rollouts, roles=self.group.roles, rewards=self.group.rewards
        )
        self.device = device
        trained = self.models.policy or self.models.critic
        if trained is None:
            together = processes_of_a_row(config.sharding)
            return Standing(self.number, self.number // together, self.group.size // together)
        backend = trained.trained.backend
        seed_dropout(config.batches.seed, backend.process // config.sharding.ds_tensor_parallel_size)
        return Standing(backend.process, backend.rank, backend.data_parallel_size)

    def do(self, verb: str, *arguments: object) -> Any:
        """Call a method of `Models`."""
        return getattr(self.models, verb)(*arguments)

    def open_channel(self, channel: Channel) -> Channel:
        """Serve a new channel to engines and close the previous one."""
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

    def pulse(self) -> None:
        """Block forever; the pending call fails as soon as the process dies, which tells the driver."""
        threading.Event().wait()

    def leave(self) -> None:
        os._exit(0)


class EngineWorker:
    """One engine. If it serves a policy, requests wait for the policy's weights instead of using those on disk."""

    def __init__(self, spec: EngineSpec, number: int) -> None:
        self.spec = spec
        self.number = number
        self.may_draw = asyncio.Event()
        if not spec.awaits_weights:
            self.may_draw.set()

    async def start(self, folder: str) -> None:
        settle_in(folder)
        model = self.spec.model
        tokenizer = load_tokenizer(str(model.pretrain), model)
        self.engine = make_engine(self.spec, tokenizer, choose_device(model.device), self.number)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await self.may_draw.wait()
        return await self.engine.generate(requests)

    async def load(self, weights: Weights, version: int, verify: bool) -> Checksums:
        """Load the policy's weights and let waiting requests start."""
        sums = await self.engine.load(weights, version, verify=verify)
        self.may_draw.set()
        return sums

    async def do(self, verb: str, *arguments: object, **named: object) -> None:
        """Call a method of the engine."""
        await getattr(self.engine, verb)(*arguments, **named)

    async def leave(self) -> None:
        os._exit(0)


def processes_of_a_row(sharding: ShardingFlags) -> int:
    """Return how many processes see the same rows in a group that only runs forward passes.

    Such models are not split by tensor parallelism, so it is one; with ring attention, they follow the layout of the
    trained models.
    """
    ring = sharding.ring_attn_size
    return ring * sharding.ds_tensor_parallel_size if ring > 1 else 1


def settle_in(folder: str) -> None:
    """Change to the driver's working folder, so that relative paths mean the same; not every node needs to have it."""
    disable_progress_bar()
    with suppress(FileNotFoundError):
        os.chdir(folder)
