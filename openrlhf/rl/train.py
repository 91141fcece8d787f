"""Reinforcement learning from a checked config to a saved policy.

`run` checks the models, loads the prompts and tries the reward before anything expensive starts. `train` then opens the
local or the Ray runtime and runs the controller; `Saver` writes checkpoints between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.agents.executor import GroupExecutor, ReportingExecutor
from openrlhf.algo.kl import AdaptiveKL, FixedKL, kl_controller
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import num_rollouts, policy_ranks, uses_critic
from openrlhf.data.collate import Layout
from openrlhf.data.prompts import load_eval_prompts, load_prompts
from openrlhf.errors import BackendError, RolloutError, counted
from openrlhf.event_loop import run_async
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import Sink, say
from openrlhf.rl.build import scoring_batches, training_batches
from openrlhf.rl.controller import Controller, State
from openrlhf.rl.dry_run import build_tested_executor
from openrlhf.rl.local import Runtime, open_local
from openrlhf.rl.record import Recorder, Replay, read_queue, write_queue
from openrlhf.rl.rollouts import GeneratedRollouts, PromptOrder
from openrlhf.rl.workers import Workers
from openrlhf.signals import SAVES, SAVES_NOTHING, StopRequest, stop_request
from openrlhf.training import checkpoint
from openrlhf.training.card_example import Kind
from openrlhf.training.disk_space import has_room, skip_if_disk_fails
from openrlhf.training.final_save import FinalSave, model_bytes
from openrlhf.training.fit import Interrupted
from openrlhf.training.hub import check_login, push_folder
from openrlhf.training.model_card import MakeCard, Outcome, training_card, write_card
from openrlhf.training.preflight import check_models, explain_reward_models
from openrlhf.training.rng import load_rng, save_rng, seed_everything
from openrlhf.training.run_directory import (
    explain_stop,
    find_checkpoint,
    hold_run_folders,
    make_monitor,
    run_folder,
    shown_flags,
)
from openrlhf.types import Prompt

QUEUE_FILE = "queue.jsonl"
# Starts the models and engines of a run, in this process or on a cluster.
OpenRuntime = Callable[[RLConfig, PreTrainedTokenizerBase, int], AbstractAsyncContextManager[Runtime]]


@dataclass(frozen=True)
class RLResult:
    """Outcome of a finished run: the policy's folder, its version and its last metrics."""

    save_path: Path
    steps: int
    train: Mapping[str, float]
    evaluation: Mapping[str, float]


def run(config: RLConfig, open_runtime: OpenRuntime = open_local, sinks: Sequence[Sink] = ()) -> RLResult:
    """Train, evaluate and save the policy; the config must already be checked.

    `sinks` receive every metric, in addition to the usual logs.
    """
    disable_progress_bar()
    check_login(config.hub)
    check_models(config)
    seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    prompts, eval_prompts = load_prompts(config, tokenizer), load_eval_prompts(config, tokenizer)
    order = PromptOrder(prompts, config.rollout.num_episodes, config.batches.seed)
    if len(prompts) < config.rollout.rollout_batch_size:
        few = f"only {counted(len(prompts), 'prompt')}, fewer than --rollout_batch_size"
        say(f"{few}: rollouts are smaller or repeat prompts")
    explain_reward_models(config)
    executor = build_tested_executor(config, tokenizer, prompts)
    try:
        # Models load from here on, after every check that does not need them.
        with hold_run_folders(config):
            result = run_async(train(config, open_runtime, tokenizer, order, executor, eval_prompts, sinks))
            push_folder(result.save_path, config.hub)
            return result
    except Interrupted as stop:  # a KeyboardInterrupt, which ends the event loop before `train` could catch it
        say(explain_stop(stop))
        raise
    finally:
        run_async(executor.close())


async def train(
    config: RLConfig,
    open_runtime: OpenRuntime,
    tokenizer: PreTrainedTokenizerBase,
    order: PromptOrder,
    executor: GroupExecutor,
    eval_prompts: Sequence[Prompt],
    sinks: Sequence[Sink],
) -> RLResult:
    """Train from the start or from a checkpoint until the policy is saved, and close everything that was started."""
    resume_from = find_checkpoint(config)
    run_id = (checkpoint.run_of(resume_from) if resume_from else None) or checkpoint.new_run_id()
    state = load_state(resume_from, kl_controller(config.kl.init_kl_coef, config.kl.kl_target, config.kl.kl_horizon))
    layout = Layout(config.batches.packing_samples, tokenizer.pad_token_id)
    rollouts = num_rollouts(config, len(order))
    async with open_runtime(config, tokenizer, rollouts) as runtime:
        if resume_from:  # before the monitor changes the run directory: the checkpoint may not fit this model
            await runtime.workers.load(resume_from)
            load_rng(resume_from, 0)
        shares_prefixes = await runtime.workers.shares_prefixes()
        monitor = make_monitor(config, rollouts, state.version, sinks)
        reporting = ReportingExecutor(executor, monitor.tell)
        live = GeneratedRollouts(order, runtime.engine, reporting, runtime.workers, config)
        controller = Controller(
            config,
            state,
            source=Replay(Path(config.rollout.replay).expanduser()) if config.rollout.replay else live,
            engine=runtime.engine,
            executor=reporting,
            workers=runtime.workers,
            sync=runtime.sync,
            monitor=monitor,
            recorder=Recorder(run_folder(config), tokenizer.decode, config.rollout, seed=config.batches.seed),
            scoring=scoring_batches(config, layout, ranks=policy_ranks(config), shares_prefixes=shares_prefixes),
            training=training_batches(config, layout, shares_prefixes=shares_prefixes),
            eval_prompts=eval_prompts,
            encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        )
        was_complete = controller.exhausted and not state.queue
        try:
            await runtime.sync.sync(state.version)
            with stop_request(SAVES_NOTHING if config.checkpoints.disable_ds_ckpt else SAVES) as stop:
                await controller.run(Saver(config, runtime.workers, stop, tokenizer, run_id, len(order.prompts)))
            if was_complete and state.version:
                say(f"the checkpoint is at step {state.version}: no steps are left to train")
            elif not controller.last and not monitor.stops:
                raise nothing_trained(reporting, filtered=config.rollout.dynamic_filtering)
            await runtime.sync.begin_training()
            folder, fallback = Path(config.checkpoints.save_path), Path(config.checkpoints.ckpt_path) / checkpoint.MODEL
            outcome = outcome_of(controller, len(order.prompts))
            card = partial(training_card, config, outcome)
            savings = [await save_finished(runtime.workers.export, tokenizer, card, folder, fallback)]
            if config.critic.save_value_network and uses_critic(config):
                places = [path.with_name(f"{path.name}_critic") for path in (folder, fallback)]
                card = partial(training_card, config, outcome, folder=places[0], kind=Kind.CRITIC)
                savings.append(await save_finished(runtime.workers.export_critic, tokenizer, card, *places))
            for saving in savings:
                saving.must_be_in_place()
        finally:
            controller.monitor.close()
    if reporting.failures:
        say(f"{reporting.summary}, the first: {reporting.first}")
    say(f"saved {folder}")
    return RLResult(folder, state.version, controller.last, controller.last_evaluation)


def nothing_trained(reporting: ReportingExecutor, *, filtered: bool) -> RolloutError:
    """Return the error for a run that kept no group of samples, so that it took no step and saves no policy."""
    problem = "no step was trained, and nothing is saved: no group of samples was kept"
    if reporting.failures:
        return RolloutError(
            f"{problem}. {reporting.summary}, the first: {reporting.first}",
            try_this="--on_reward_error stop, to end at the first error",
        )
    if filtered:
        rejected = f"--dynamic_filtering rejected the groups of all {reporting.samples} samples"
        return RolloutError(f"{problem}. {rejected}", try_this="a wider --dynamic_filtering_reward_range")
    return RolloutError(problem)


@dataclass(frozen=True)
class Saver:
    """Callback after each step.

    It writes a checkpoint when one is due or a stop is requested, and keeps the checkpoint with the best metric.
    """

    config: RLConfig
    workers: Workers
    stop: StopRequest
    tokenizer: PreTrainedTokenizerBase
    run_id: str
    num_prompts: int

    async def __call__(self, controller: Controller) -> None:
        flags, version = self.config.checkpoints, controller.state.version
        due = (flags.save_steps > 0 and version % flags.save_steps == 0) or self.stop.requested
        best = self.is_best(controller)
        if not (due or best):
            return
        await controller.sync.begin_training()
        root = Path(flags.ckpt_path)
        if best:
            await self.save(controller, root / checkpoint.BEST, f"the best checkpoint, of step {version}")
        if due:
            folder, saved = checkpoint.step_folder(root, version), False
            if not flags.disable_ds_ckpt and await self.save(controller, folder, f"the checkpoint of step {version}"):
                with skip_if_disk_fails(f"the file {checkpoint.LATEST} of step {version}"):
                    checkpoint.point_latest(root, version)
                    saved = True
            if flags.save_hf_ckpt:
                model = folder.with_name(f"{folder.name}_hf")
                card = partial(training_card, self.config, outcome_of(controller, self.num_prompts), folder=model)
                with skip_if_disk_fails(f"the model folder of step {version}"):
                    await export(self.workers.export, self.tokenizer, card, model)
            checkpoint.rotate(root, step=version, run=self.run_id, keep=flags.max_ckpt_num, max_gib=flags.max_ckpt_mem)
            if self.stop.requested:
                raise Interrupted(folder if saved else None, disabled=flags.disable_ds_ckpt)
        await controller.sync.end_training(version)

    async def save(self, controller: Controller, folder: Path, what: str) -> bool:
        """Write a checkpoint to a temporary folder, then rename it, so that it is complete or absent.

        Return whether it was written; if the disk has no room, the run continues without it.
        """
        state = controller.state
        # The first checkpoint takes at least three times the size of the model: weights and two moments.
        needed = checkpoint.bytes_of_last(folder.parent, self.run_id) or 3 * model_bytes(self.config)
        if not has_room(folder.parent, needed, what):
            return False
        with skip_if_disk_fails(what):
            with checkpoint.writing(folder) as aside:
                await self.workers.save(aside)
                save_rng(aside, 0)
                write_queue(aside / QUEUE_FILE, state.queue)
                saved = {"step": state.version, "settings": shown_flags(self.config), **state.plain()}
                checkpoint.write_state(aside, saved | {"run": self.run_id})
            return True
        return False

    def is_best(self, controller: Controller) -> bool:
        """Return whether the last evaluation is the best so far by --best_metric_key, and record it if so.

        Always False if --save_steps is off.
        """
        state, values, every = controller.state, controller.last_evaluation, self.config.logs.eval_steps
        # By default, pass@1 of the first datasource that has it, else the first mean reward.
        usual = (name for end in ("_pass1", "_reward") for name in values if name.endswith(end))
        key = self.config.critic.best_metric_key or next(usual, "none")
        if key == "none" or every <= 0 or state.version % every or not values:
            return False
        if key not in values:
            known = ", ".join(values)
            controller.monitor.tell(f"--best_metric_key {key} is not among the evaluation's metrics: {known}")
            return False
        if state.best is not None and state.best_key == key and values[key] <= state.best:
            return False
        state.best, state.best_key = values[key], key
        return self.config.checkpoints.save_steps > 0


def load_state(folder: Path | None, kl: FixedKL | AdaptiveKL) -> State:
    """Read the loop's state, including its queue, from a checkpoint; without one, return a new state."""
    if folder is None:
        return State(kl)
    saved = checkpoint.read_state(folder)
    own = {name: saved[name] for name in ("version", "made", "place", "failures", "best", "best_key") if name in saved}
    state = State(kl=replace(kl, **saved["kl"]), queue=deque(read_queue(folder / QUEUE_FILE)), **own)
    # Every rollout that was made has been trained or is in the queue, and used at least one prompt.
    if state.made != state.version + len(state.queue) or state.place < state.made:
        raise BackendError(
            f"the checkpoint {folder} is inconsistent (rollouts made: {state.made}, trained: {state.version}, queued: "
            f"{len(state.queue)}; prompts used: {state.place}): prompts would be repeated or skipped",
            try_this="an older checkpoint, or start over without --load_checkpoint",
        )
    return state


def outcome_of(controller: Controller, num_prompts: int) -> Outcome:
    """Return what the run has reached, for the card of a model that is saved now."""
    return Outcome(
        rows=num_prompts,
        eval_rows=len(controller.eval_prompts),
        step=controller.state.version,
        train=controller.last,
        evaluation=controller.last_evaluation,
    )


async def export(
    write: Callable[[Path], Awaitable[None]], tokenizer: PreTrainedTokenizerBase, card: MakeCard, folder: Path
) -> None:
    """Write a model and its tokenizer for plain Transformers; the folder appears only when it is complete."""
    with checkpoint.exporting(folder) as aside:
        await write(aside)
        tokenizer.save_pretrained(aside)
        write_card(aside, card)


async def save_finished(
    write: Callable[[Path], Awaitable[None]],
    tokenizer: PreTrainedTokenizerBase,
    card: MakeCard,
    folder: Path,
    fallback: Path,
) -> FinalSave:
    """Export a trained model to `folder`, or elsewhere if that disk is full or not writable."""
    saving = FinalSave(folder, fallback)
    for attempt in saving.attempts():
        with attempt as aside:
            await write(aside)
            tokenizer.save_pretrained(aside)
            write_card(aside, card)
    return saving
