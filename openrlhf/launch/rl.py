"""Reinforcement learning, from config to a saved policy. One process here; the controller is the same on a cluster."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.agents.executor import GroupExecutor
from openrlhf.algo.kl import AdaptiveKL, FixedKL, kl_controller
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import resolve_runtime
from openrlhf.data.collate import Layout
from openrlhf.data.prompts import load_eval_prompts, load_prompts
from openrlhf.errors import ConfigError
from openrlhf.launch.device import choose_device, explain_precision, seed_everything
from openrlhf.launch.local_rl import build_workers
from openrlhf.launch.local_workers import LocalSync, LocalWorkers
from openrlhf.launch.record import shown_flags
from openrlhf.launch.rl_settings import make_settings, num_rollouts
from openrlhf.launch.run_files import explain_stop, find_checkpoint, make_monitor, run_folder
from openrlhf.launch.trial import tried_executor
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import say
from openrlhf.rl.controller import Controller, Parts, State
from openrlhf.rl.record import Recorder, Replay, read_queue, write_queue
from openrlhf.rl.rollouts import Generated, PromptOrder
from openrlhf.rollout.hf import HFEngine
from openrlhf.training import checkpoint
from openrlhf.training.fit import Interrupted
from openrlhf.training.interrupt import Interrupt
from openrlhf.training.rng import load_rng, save_rng
from openrlhf.types import Prompt

QUEUE_FILE = "queue.jsonl"


@dataclass(frozen=True)
class RLResult:
    """What a finished run leaves: the policy's folder and its last metrics."""

    save_path: Path
    steps: int
    train: Mapping[str, float]
    evaluation: Mapping[str, float]


def run(config: RLConfig) -> RLResult:
    """Trains, evaluates and saves; the config has been checked."""
    if resolve_runtime(config) == "ray":
        raise ConfigError("training on Ray is not built yet", try_this="--runtime local")
    if config.engines.vllm_num_engines:
        raise ConfigError("vLLM is not built in yet", try_this="without --vllm_num_engines: Transformers generates")
    disable_progress_bar()
    device = choose_device(config.model.device)
    explain_precision(config.model.param_dtype, device)
    seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    prompts, eval_prompts = load_prompts(config, tokenizer), load_eval_prompts(config, tokenizer)
    order = PromptOrder(prompts, config.rollout.num_episodes, config.batches.seed)
    if len(prompts) < config.rollout.rollout_batch_size:
        say(f"{len(prompts)} prompts are fewer than --rollout_batch_size: a rollout takes what there is")
    executor = tried_executor(config, tokenizer, prompts)
    try:
        return run_with(executor, config, tokenizer, device, order, eval_prompts)
    finally:
        asyncio.run(executor.close())


def run_with(
    executor: GroupExecutor,
    config: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    order: PromptOrder,
    eval_prompts: Sequence[Prompt],
) -> RLResult:
    """The run from here on: models load now, after all that could be refused without them."""
    workers = build_workers(config, tokenizer, device, num_rollouts(config, order))
    engine, sync = make_engine(config, workers, tokenizer)
    resume_from = find_checkpoint(config)
    state = load_state(resume_from, first_kl(config))
    settings = make_settings(config, Layout(config.batches.packing_samples, tokenizer.pad_token_id))
    live = Generated(order, engine, executor, workers, settings.rollout)
    parts = Parts(
        source=Replay(Path(config.rollout.replay).expanduser()) if config.rollout.replay else live,
        engine=engine,
        executor=executor,
        workers=workers,
        sync=sync,
        monitor=make_monitor(config, num_rollouts(config, order), state.version),
        recorder=Recorder(run_folder(config), tokenizer.decode, resumed_at=state.version),
        eval_prompts=eval_prompts,
    )
    controller = Controller(parts, settings, state)
    try:
        return asyncio.run(train(controller, workers, tokenizer, config, resume_from))
    except Interrupted as stop:  # as a KeyboardInterrupt it leaves the event loop at once, past every coroutine
        say(explain_stop(stop))
        raise


async def train(
    controller: Controller,
    workers: LocalWorkers,
    tokenizer: PreTrainedTokenizerBase,
    config: RLConfig,
    resume_from: Path | None,
) -> RLResult:
    """The loop between its beginning (or a checkpoint) and the saved policy; nothing it started outlives it."""
    if resume_from:
        await workers.load(resume_from)
        load_rng(resume_from, 0)
        await controller.parts.sync.sync(controller.state.version)
    try:
        with Interrupt(saves=not config.checkpoints.disable_ds_ckpt) as interrupt:
            await controller.run(Saver(config, workers, interrupt, tokenizer))
        if not controller.last:
            say(explain_nothing(controller.state.version))
        folder = await save_policy(workers, tokenizer, config)
    finally:
        await controller.parts.executor.close()
        controller.parts.monitor.close()
    say(f"saved {folder}")
    return RLResult(folder, controller.state.version, controller.last, controller.last_evaluation)


def explain_nothing(version: int) -> str:
    if version:
        return f"the checkpoint stands at step {version}, and no step is left to train"
    return "no step was trained: no group of samples was kept"


class Saver:
    """After each step: a checkpoint when it is time or when the run was asked to stop; the best policy by metric."""

    def __init__(
        self, config: RLConfig, workers: LocalWorkers, interrupt: Interrupt, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.config = config
        self.workers = workers
        self.interrupt = interrupt
        self.tokenizer = tokenizer

    async def __call__(self, controller: Controller) -> None:
        flags, version = self.config.checkpoints, controller.state.version
        due = flags.save_steps > 0 and version % flags.save_steps == 0
        if self.is_best(controller):
            await self.save(controller, Path(flags.ckpt_path) / "best")
        if due or self.interrupt.wished:
            root = Path(flags.ckpt_path)
            folder = checkpoint.step_folder(root, version)
            if not flags.disable_ds_ckpt:
                await self.save(controller, folder)
                checkpoint.point_latest(root, version)
            if flags.save_hf_ckpt:
                await export_policy(self.workers, self.tokenizer, folder.with_name(f"{folder.name}_hf"))
            checkpoint.rotate(root, keep=flags.max_ckpt_num, max_gib=flags.max_ckpt_mem)
            if self.interrupt.wished:
                raise Interrupted(None if flags.disable_ds_ckpt else folder)

    async def save(self, controller: Controller, folder: Path) -> None:
        aside = folder.with_name(f".{folder.name}.writing")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        await self.workers.save(aside)
        save_rng(aside, 0)
        write_queue(aside / QUEUE_FILE, controller.state.queue)
        checkpoint.write_state(
            aside, {"step": controller.state.version, "settings": shown_flags(self.config), **controller.state.plain()}
        )
        checkpoint.flush_tree(aside)
        checkpoint.publish(aside, folder)

    def is_best(self, controller: Controller) -> bool:
        """True when the last evaluation beat all before it, by the metric that --best_metric_key names."""
        key, values = self.config.critic.best_metric_key, controller.last_evaluation
        key = key or next((name for name in values if name.endswith("_pass1")), "none")
        every = self.config.logs.eval_steps
        if key == "none" or key not in values or every <= 0 or controller.state.version % every:
            return False
        if controller.state.best is not None and values[key] <= controller.state.best:
            return False
        controller.state.best = values[key]
        return self.config.checkpoints.save_steps > 0


def make_engine(
    config: RLConfig, workers: LocalWorkers, tokenizer: PreTrainedTokenizerBase
) -> tuple[HFEngine, LocalSync]:
    """The engine shares the policy's network, or has a copy where training must not move what generates."""
    policy = workers.policy.backend
    shared = not (config.asynchrony.async_train and config.asynchrony.async_queue_size > 0)
    network = policy.network if shared else copy.deepcopy(policy.network)
    engine = HFEngine(network, tokenizer)
    return engine, LocalSync(policy, engine, shared=shared)


def first_kl(config: RLConfig) -> FixedKL | AdaptiveKL:
    return kl_controller(config.kl.init_kl_coef, config.kl.kl_target, config.kl.kl_horizon)


def load_state(folder: Path | None, kl: FixedKL | AdaptiveKL) -> State:
    """Where a checkpoint left the loop, its queue included; a fresh state without one."""
    if folder is None:
        return State(kl)
    saved = checkpoint.read_state(folder)
    return State(
        kl=replace(kl, **saved["kl"]),
        version=saved["version"],
        made=saved["made"],
        place=saved["place"],
        queue=deque(read_queue(folder / QUEUE_FILE)),
        best=saved["best"],
    )


async def save_policy(workers: LocalWorkers, tokenizer: PreTrainedTokenizerBase, config: RLConfig) -> Path:
    folder = Path(config.checkpoints.save_path)
    await export_policy(workers, tokenizer, folder)
    if config.critic.save_value_network and workers.critic is not None:
        critic = folder.with_name(f"{folder.name}_critic")
        checkpoint.export_together(Alone(), critic, workers.critic.backend.export)
        tokenizer.save_pretrained(critic)
    return folder


async def export_policy(workers: LocalWorkers, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    def fill(aside: Path) -> None:
        workers.export(aside)
        tokenizer.save_pretrained(aside)

    checkpoint.export_together(Alone(), folder, fill)


class Alone:
    """One process, for functions that several share."""

    process = 0

    def barrier(self) -> None:
        """Nobody to wait for."""
