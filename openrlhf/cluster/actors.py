"""Worker process of a run on a cluster: one rank of a model group.

It is a plain class, like the `EngineWorker` of an engine (`rollout.engine_worker`); `starter` turns both into Ray
actors. The driver reaches them through `calls.Process`: it passes a method of `Models`, and the worker calls it on its
own models.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from openrlhf.config.commands import RLConfig
from openrlhf.config.worker_groups import GroupPlan
from openrlhf.models.load import load_tokenizer
from openrlhf.rl.build import build_models
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.weight_sender import WeightSender
from openrlhf.training.processes import enter_folder, join
from openrlhf.training.rng import seed_dropout, seed_everything

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
        """Join the group, load the models and return this rank's position; `folder` is the driver's working folder."""
        enter_folder(folder)
        sharding = config.sharding
        self.device = join(config)
        seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
        tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
        self.models = build_models(config, tokenizer, self.device, rollouts, roles=group.roles, rewards=group.rewards)
        gc.collect()
        gc.freeze()  # DeepSpeed collects garbage whenever states are offloaded: 0.4 s over all imported objects
        model = self.models.policy or self.models.critic
        if model is None:
            # Frozen models are not split by tensor parallelism, so each process gets its own rows. With ring attention,
            # they follow the layout of the trained models instead.
            ring = sharding.ring_attn_size
            peers = ring * sharding.ds_tensor_parallel_size if ring > 1 else 1
            return RankInfo(number // peers, group.size // peers)
        backend = model.backend
        seed_dropout(config.batches.seed, backend.process // sharding.ds_tensor_parallel_size)
        return RankInfo(backend.rank, backend.data_parallel_size)

    def apply(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        """Call a method of `Models` on this process's models."""
        return method(self.models, *arguments)

    def open_channel(self, channel: Channel | None) -> Channel | None:
        """Close the previous channel to engines and open a new one, if this process sends; return it."""
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(channel, self.device) if channel is not None else None
        return self.sender.channel if self.sender is not None else None

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
