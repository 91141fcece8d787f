"""The processes of a run on a cluster: models of one group, or one engine. Plain classes; Ray makes actors of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import RLConfig
from openrlhf.launch.device import choose_device, seed_dropout, seed_everything
from openrlhf.launch.distributed import join
from openrlhf.launch.engines import vllm_settings
from openrlhf.launch.ray_placement import Group
from openrlhf.launch.rl_build import build_models
from openrlhf.launch.rl_models import Models
from openrlhf.models.forward import Network
from openrlhf.models.load import choose_dtype, load_causal_lm, load_tokenizer
from openrlhf.rollout.channel import Channel, Sender
from openrlhf.rollout.engine import Checksums, LoadingEngine, Weights
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.local import LocalFrozen
from openrlhf.types import Completion, Request


@dataclass(frozen=True)
class Standing:
    """Where a process stands among those of its group: tensor-parallel peers share a data-parallel rank."""

    process: int
    rank: int
    data_parallel_size: int


class ModelWorker:
    """One process of a group: it holds its share of the group's models and does what the driver says, in order."""

    def __init__(self, config: RLConfig, group: Group, rollouts: int, number: int) -> None:
        self.config = config
        self.group = group
        self.rollouts = rollouts
        self.number = number
        self.models = Models()
        self.sender: Sender | None = None

    def start(self, folder: str) -> Standing:
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
        if trained is None:  # models that only look are not split by tensor
            return Standing(self.number, self.number, self.group.size)
        backend = trained.trained.backend
        seed_dropout(config.batches.seed, backend.rank)
        return Standing(backend.process, backend.rank, backend.data_parallel_size)

    def do(self, verb: str, *arguments: object) -> Any:
        return getattr(self.models, verb)(*arguments)

    def open_channel(self, channel: Channel) -> Channel:
        """Serves a new channel to engines in place of the one before."""
        if self.sender is not None:
            self.sender.close()
        self.sender = Sender(channel, self.device)
        return self.sender.channel

    def send(self, version: int, verify: bool) -> Checksums:
        """The policy's weights to the engines; a process without a channel helps to gather them."""
        weights = iter(self.models.weights())
        try:
            return self.sender.send(weights, version, verify=verify) if self.sender is not None else {}
        finally:
            for _ in weights:  # ranks gather together, so to the end, whatever became of the channel
                pass

    def pulse(self) -> None:
        """Never returns: whoever awaits it hears at once when the process dies."""
        threading.Event().wait()


class EngineWorker:
    """One engine. Nothing is drawn from the weights of the model's folder: requests wait for the policy's."""

    def __init__(self, config: RLConfig, kind: str, number: int) -> None:
        self.config = config
        self.kind = kind
        self.number = number
        self.has_weights = asyncio.Event()

    async def start(self, folder: str) -> None:
        settle_in(folder)
        config = self.config
        device = choose_device(config.model.device)
        tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
        if self.kind == "vllm":
            from openrlhf.rollout.vllm import VLLMEngine

            dtype = choose_dtype(config.model.param_dtype, device)
            self.engine: LoadingEngine = VLLMEngine(vllm_settings(config, dtype, self.number), tokenizer)
        else:
            model = load_causal_lm(str(config.model.pretrain), config.model, device=device, packing=False)
            self.engine = HFEngine(LocalFrozen(Network(model), device).network, tokenizer)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await self.has_weights.wait()
        return await self.engine.generate(requests)

    async def load(self, weights: Weights, version: int, verify: bool) -> Checksums:
        sums = await self.engine.load(weights, version, verify=verify)
        self.has_weights.set()
        return sums

    async def do(self, verb: str, *arguments: object, **named: object) -> None:
        await getattr(self.engine, verb)(*arguments, **named)

    async def pulse(self) -> None:
        """Never returns, like a worker's."""
        await asyncio.Event().wait()


def settle_in(folder: str) -> None:
    """Stands where the driver stands, so that a relative path means the same here; not every node need have it."""
    disable_progress_bar()
    with suppress(FileNotFoundError):
        os.chdir(folder)
