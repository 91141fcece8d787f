"""Local runtime of reinforcement learning: models, engine and weight sync, without Ray.

`open_local` builds them and yields a `Runtime`, as `cluster.launch.open_ray` does for a cluster. `rl.train` runs the
controller with it. The models are in this process, and so is the engine, unless there are several (`local_engines`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import is_asynchronous, uses_vllm
from openrlhf.models.plain import plain_copy
from openrlhf.plan.estimate import LOADING
from openrlhf.rl.build import build_models
from openrlhf.rl.engines import engine_spec, make_engine
from openrlhf.rl.local_engines import LocalPolicy, engines_per_gpu, open_engines
from openrlhf.rl.models import Models
from openrlhf.rl.workers import BatchScores, ModelRewards, Runtime, WeightSync
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.group_sync import GroupSync
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.sync_proof import RecordedWeights, SyncProof, compare
from openrlhf.training.memory_check import check_memory, detect_machine, explain_memory
from openrlhf.training.preflight import explain_hardware
from openrlhf.training.processes import join
from openrlhf.training.rng import seed_everything
from openrlhf.types import PolicyBatch, RolloutBatch, Trajectory

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LocalWorkers:
    """The `Workers` of a run whose models are all in this process."""

    models: Models
    on_thread: bool = False  # compute in a thread, so that the engine keeps generating
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while weights change

    async def _run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.to_thread(work, *arguments) if self.on_thread else work(*arguments)

    async def agree_on_prefixes(self) -> int:
        limit = self.models.sharing_limit()
        if not limit:
            self.models.share_no_prefixes()
        return limit

    async def score(self, batches: Sequence[RolloutBatch], *, log_probs: bool) -> BatchScores:
        models = self.models
        score_reference = partial(models.log_probs, of_reference=True)
        return BatchScores(  # policy last, so that it stays awake for training if models sleep
            values=await self._run(models.values, batches) if models.critic else None,
            reference_log_probs=await self._run(score_reference, batches) if models.reference else None,
            log_probs=await self._run(models.log_probs, batches) if log_probs else None,
        )

    async def log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        return await self._run(self.models.log_probs, batches)

    async def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards | None:
        return await self._run(self.models.rewards, trajectories) if self.models.reward_models else None

    async def train(
        self, micro_batches: Sequence[PolicyBatch], *, kl_coef: float, progress: float, train_policy: bool
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        if train_policy:
            async with self.updating:
                values |= await self._run(self.models.train_policy, micro_batches, kl_coef, progress)
        if self.models.critic is not None:
            values |= await self._run(self.models.train_critic, micro_batches, progress)
        return values

    async def save(self, folder: Path) -> None:
        self.models.save(folder)

    async def load(self, folder: Path) -> None:
        self.models.load(folder)

    async def export(self, folder: Path) -> None:
        self.models.export(folder)

    async def export_critic(self, folder: Path) -> None:
        self.models.export_critic(folder)


@dataclass(frozen=True)
class SharedSync:
    """Sync with an engine that generates with the policy's network, so that no weights need to be sent."""

    models: Models
    engine: HFEngine

    async def sync(self, version: int) -> None:
        self.models.wake_policy()
        self.engine.version = version

    async def begin_training(self) -> None:
        """Do nothing: the engine uses the policy's network and has no device memory to release."""

    async def end_training(self, version: int) -> None:
        self.models.wake_policy()


@dataclass
class LocalSync:
    """Sync with an engine in this process that has its own copy of the weights."""

    models: Models
    engine: LoadingEngine
    sleeps: bool = False  # the engine sleeps while the models train
    drains: bool = True  # running requests finish with the old weights before the sync
    proof: SyncProof = field(default_factory=SyncProof)

    async def sync(self, version: int) -> None:
        """Pause the engine, copy the policy's weights into it, verify them if due, and resume.

        If the engine sleeps, its memory is restored in two steps: for the weights before the copy, and for the KV cache
        after the models have left the device.
        """
        verify = self.proof.is_due()
        await self.engine.pause(drain=self.drains)
        if self.sleeps:
            self.models.free_cache()  # vLLM does not take memory from PyTorch's cache
            await self.engine.wake("weights")
        sent = RecordedWeights(self.models.weights(), verify=verify)
        received = await self.engine.load(sent, version, verify=verify)
        compare(sent.checksums, received, "the engine")
        self.proof.conclude(sent.checksums)
        self.models.rest()
        if self.sleeps:
            self.models.free_cache()
            await self.engine.wake("cache")
        await self.engine.resume()

    async def begin_training(self) -> None:
        if self.sleeps:
            await self.engine.sleep()

    async def end_training(self, version: int) -> None:
        if self.sleeps:
            await self.sync(version)


@asynccontextmanager
async def open_local(config: RLConfig, tokenizer: PreTrainedTokenizerBase, rollouts: int) -> AsyncIterator[Runtime]:
    """Build models, engine and weight sync.

    vLLM is started before the models are built, because it seeds torch (see rollout/vllm) and measures the free memory.
    With --vllm_enable_sleep, it sleeps while the models load.
    """
    device = join(config)
    explain_hardware(config, device)
    machine = detect_machine(device.type)
    check_memory(config, machine)
    asynchronous = is_asynchronous(config)
    if not uses_vllm(config):
        with explain_memory(config, LOADING, machine):
            models = build_models(config, tokenizer, device, rollouts)
        network = models.wake_policy().network
        whole = config.rollout.whole_log_probs
        own = plain_copy(network) if asynchronous else network
        timeout = config.engines.engine_timeout
        engine = HFEngine(own, tokenizer, whole_log_probs=whole, timeout=timeout, shows_progress=True)
        try:
            if not config.rollout.replay:
                engine.prepare()
            sync: WeightSync = SharedSync(models, engine)
            if asynchronous:
                sync = LocalSync(models, engine, proof=SyncProof(config.engines.sync_check_every))
            yield Runtime(LocalWorkers(models), engine, sync, machine)
        finally:
            await engine.close()
        return
    count = engines_per_gpu(config)
    sleeps, drains = config.engines.vllm_enable_sleep, not config.asynchrony.partial_rollout
    proof = SyncProof(config.engines.sync_check_every)

    def load_models() -> LocalWorkers:
        seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
        with explain_memory(config, LOADING, machine):
            return LocalWorkers(build_models(config, tokenizer, device, rollouts), on_thread=asynchronous)

    if count > 1:
        async with open_engines(config, count, device) as group:
            if sleeps:
                await group.apply(lambda process: process.call(EngineWorker.sleep))
            workers = load_models()
            with closing(LocalPolicy(workers.models, device, workers.updating)) as policy:
                group_sync = GroupSync(policy, group, sleeps, drains, proof)
                group.send_weights = group_sync.resend
                yield Runtime(workers, group, group_sync, machine)
        return
    vllm = make_engine(engine_spec(config), tokenizer, device)
    try:
        if sleeps:
            await vllm.sleep()
        workers = load_models()
        yield Runtime(workers, vllm, LocalSync(workers.models, vllm, sleeps, drains, proof), machine)
    finally:
        await vllm.close()
