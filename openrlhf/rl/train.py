"""Reinforcement learning from a checked config to a saved policy.

`run` checks the models, loads the prompts and tests the reward before anything expensive starts. `train` then opens the
local or the Ray runtime and runs the controller. `checkpoints.py` saves checkpoints and the final models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.agents.episodes import AgentEpisodes
from openrlhf.agents.executor import GroupExecutor
from openrlhf.agents.single_turn import SingleTurnSamples
from openrlhf.algo.kl import kl_controller
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import num_rollouts, policy_ranks
from openrlhf.data.collate import Layout
from openrlhf.data.prompts import load_prompts
from openrlhf.errors import RolloutError, counted
from openrlhf.event_loop import run_async
from openrlhf.models.load import load_tokenizer, read_config
from openrlhf.monitor import Monitor, Sink, say
from openrlhf.rl.build import scoring_batches, training_batches
from openrlhf.rl.checkpoints import Saver, load_state, save_models
from openrlhf.rl.controller import Controller
from openrlhf.rl.dry_run import build_tested_executor
from openrlhf.rl.group_stream import GeneratedRollouts
from openrlhf.rl.local import open_local
from openrlhf.rl.record import Recorder, Replay
from openrlhf.rl.rollouts import GroupRunner, PromptOrder, RolloutSource
from openrlhf.rl.state import State
from openrlhf.rl.workers import Runtime
from openrlhf.signals import SAVES, SAVES_NOTHING, stop_request
from openrlhf.training import checkpoint
from openrlhf.training.fit import Interrupted
from openrlhf.training.hub import check_login, push_folder
from openrlhf.training.model_card import warn_if_prompted_differently
from openrlhf.training.preflight import check_engines, check_models, check_reward_models
from openrlhf.training.process_state import present_objects_frozen
from openrlhf.training.rng import load_rng, seed_everything
from openrlhf.training.run_directory import (
    explain_stop,
    find_checkpoint,
    hold_run_folders,
    make_monitor,
    run_folder,
)
from openrlhf.types import Prompt

# Starts the models and engines of a run, in this process or on a cluster.
OpenRuntime = Callable[[RLConfig, PreTrainedTokenizerBase, int], AbstractAsyncContextManager[Runtime]]


@dataclass(frozen=True)
class RLResult:
    """Outcome of a finished run: the policy's folder, its version and its last metrics."""

    save_path: Path
    steps: int
    train: Mapping[str, float]
    evaluation: Mapping[str, float]


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs besides models and engines."""

    config: RLConfig
    tokenizer: PreTrainedTokenizerBase
    order: PromptOrder
    executor: GroupExecutor
    eval_prompts: Sequence[Prompt]
    sinks: Sequence[Sink]


def run(config: RLConfig, open_runtime: OpenRuntime = open_local, sinks: Sequence[Sink] = ()) -> RLResult:
    """Train, evaluate and save the policy; the config must already be checked.

    `sinks` receive every metric, in addition to the usual logs.
    """
    disable_progress_bar()
    check_login(config.hub)
    check_models(config)
    check_engines(config)
    seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    prompts, eval_prompts = load_prompts(config, tokenizer)
    order = PromptOrder(prompts, config.rollout.num_episodes, config.batches.seed)
    if len(prompts) < config.rollout.rollout_batch_size:
        few = f"only {counted(len(prompts), 'prompt')}, fewer than --rollout_batch_size"
        say(f"{few}: rollouts are smaller or repeat prompts")
    frozen, rollouts = config.policy.freezing_actor_steps, num_rollouts(config, len(order))
    if frozen >= rollouts and not config.rollout.replay:  # a record may be longer
        say(f"the policy is never trained: --freezing_actor_steps {frozen} covers {counted(rollouts, 'rollout')}")
    warn_if_prompted_differently(config)
    check_reward_models(config)
    executor = build_tested_executor(config, tokenizer, prompts)
    prepared = Prepared(config, tokenizer, order, executor, eval_prompts, sinks)
    try:
        # Models load from here on, after every check that does not need them.
        with hold_run_folders(config):
            result = run_async(train(prepared, open_runtime))
            push_folder(result.save_path, config.hub)
            return result
    except Interrupted as stop:  # a KeyboardInterrupt, which ends the event loop before `train` could catch it
        say(explain_stop(stop))
        raise
    finally:
        run_async(executor.close())


async def train(prepared: Prepared, open_runtime: OpenRuntime) -> RLResult:
    """Train from the start or from a checkpoint until the policy is saved, and close everything that was started."""
    config, order = prepared.config, prepared.order
    resume_from = find_checkpoint(config)
    run_id = (checkpoint.run_of(resume_from) if resume_from else None) or checkpoint.new_run_id()
    state = load_state(resume_from, kl_controller(config.kl.init_kl_coef, config.kl.kl_target, config.kl.kl_horizon))
    rollouts = num_rollouts(config, len(order))
    async with open_runtime(config, prepared.tokenizer, rollouts) as runtime:
        if isinstance(prepared.executor, SingleTurnSamples | AgentEpisodes):
            await prepared.executor.add_pools(runtime.pools)
        if resume_from:  # before the monitor changes the run directory: the checkpoint may not fit this model
            await runtime.workers.load(resume_from)
            load_rng(resume_from, 0)
        limit = await runtime.workers.agree_on_prefixes()
        monitor = make_monitor(config, rollouts, state.version, prepared.sinks)
        runner = GroupRunner(prepared.executor, monitor.tell)
        controller = build_controller(prepared, runtime, state, monitor, runner, sharing_limit=limit)
        was_complete = controller.exhausted and not state.queue
        try:
            await runtime.sync.sync(state.version)
            stopping = stop_request(SAVES_NOTHING if config.checkpoints.disable_ds_ckpt else SAVES)
            with stopping as stop, present_objects_frozen():
                saver = Saver(config, runtime.workers, stop, prepared.tokenizer, run_id, len(order.prompts))
                await controller.run(saver)
            if was_complete and state.version:
                say(f"the checkpoint is at step {state.version}: no steps are left to train")
            elif not controller.last and not monitor.stops:
                raise nothing_trained(runner, filtered=config.rollout.dynamic_filtering)
            await runtime.sync.begin_training()
            folder = await save_models(controller, prepared.tokenizer, len(order.prompts))
        finally:
            await controller.recorder.flush()
            monitor.close()
    if runner.failures:
        say(f"{runner.summary}, the first: {runner.first}")
    say(f"saved {folder}")
    return RLResult(folder, state.version, controller.last, controller.last_evaluation)


def build_controller(
    prepared: Prepared,
    runtime: Runtime,
    state: State,
    monitor: Monitor,
    runner: GroupRunner,
    *,
    sharing_limit: int,
) -> Controller:
    """Connect the models and engines of a runtime with the prompts, the recorder and the monitor.

    `sharing_limit` is the result of `Workers.agree_on_prefixes`.
    """
    config, tokenizer, workers = prepared.config, prepared.tokenizer, runtime.workers
    layout = Layout(config.batches.packing_samples, tokenizer.pad_token_id, sharing=sharing_limit > 0)
    source: RolloutSource = GeneratedRollouts(prepared.order, runtime.engine, runner, workers, config, state.stream)
    if config.rollout.replay:
        policy = read_config(str(config.model.pretrain), config.model).get_text_config()
        source = Replay(Path(config.rollout.replay).expanduser(), max(policy.vocab_size, len(tokenizer)))
    return Controller(
        config,
        state,
        source=source,
        engine=runtime.engine,
        runner=runner,
        workers=workers,
        sync=runtime.sync,
        monitor=monitor,
        recorder=Recorder(run_folder(config), tokenizer.decode, config.rollout, seed=config.batches.seed),
        scoring=scoring_batches(config, layout, ranks=policy_ranks(config), sharing_limit=sharing_limit),
        training=training_batches(config, layout, sharing_limit=sharing_limit),
        eval_prompts=prepared.eval_prompts,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        machine=runtime.machine,
    )


def nothing_trained(runner: GroupRunner, *, filtered: bool) -> RolloutError:
    """Return the error for a run that kept no group of samples, so that it took no step and saves no policy."""
    problem = "no step was trained, and nothing is saved: no group of samples was kept"
    if runner.failures:
        return RolloutError(
            f"{problem}. {runner.summary}, the first: {runner.first}",
            try_this="--on_reward_error stop, to end at the first error",
        )
    if filtered:
        rejected = f"--dynamic_filtering rejected the groups of all {runner.samples} samples"
        return RolloutError(f"{problem}. {rejected}", try_this="a wider --dynamic_filtering_reward_range")
    return RolloutError(problem)
