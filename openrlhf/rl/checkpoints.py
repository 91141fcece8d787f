"""Saving in reinforcement learning: checkpoints between steps, and the models at the end.

The controller calls `Saver` after each step. A checkpoint holds what the workers save (weights, optimizers), the random
states, the queue of untrained rollouts, the groups that wait for their rollout, and the rest of the loop's state, which
`load_state` reads on resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from openrlhf.algo.kl import AdaptiveKL, FixedKL
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import uses_critic
from openrlhf.errors import BackendError
from openrlhf.rl.controller import Controller
from openrlhf.rl.group_stream import StreamState
from openrlhf.rl.record import read_groups, read_queue, write_groups, write_queue
from openrlhf.rl.state import State
from openrlhf.rl.workers import Workers
from openrlhf.signals import StopRequest
from openrlhf.training import atomic_folder, checkpoint
from openrlhf.training.card_example import Kind
from openrlhf.training.disk_space import has_room, skip_if_disk_fails
from openrlhf.training.final_save import FinalSave, model_bytes
from openrlhf.training.fit import Interrupted
from openrlhf.training.model_card import MakeCard, Outcome, training_card, write_card
from openrlhf.training.rng import save_rng
from openrlhf.training.run_directory import shown_flags

QUEUE_FILE, GROUPS_FILE = "queue.parquet", "groups.parquet"
WriteModel: TypeAlias = Callable[[Path], Awaitable[None]]  # writes a model's weights to a folder


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
        await controller.recorder.flush()  # a run that resumes here expects the files of all steps so far
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
                with skip_if_disk_fails(f"the model folder of step {version}"), atomic_folder.exporting(model) as aside:
                    await fill_model_folder(self.workers.export, self.tokenizer, card, aside)
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
            with atomic_folder.writing(folder) as aside:
                await self.workers.save(aside)
                save_rng(aside, 0)
                write_queue(aside / QUEUE_FILE, state.queue)
                write_groups(aside / GROUPS_FILE, state.stream.accepted)
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
    again, accepted = saved.get("again", []), read_groups(folder / GROUPS_FILE)
    drawn = saved.get("drawn", state.place)  # older checkpoints have no groups of unfinished rollouts
    state.stream = StreamState(drawn, again=again, accepted=accepted)
    # Every rollout that was made has been trained on or is in the queue, and used at least one prompt.
    if state.made != state.version + len(state.queue) or state.place < state.made:
        raise BackendError(
            f"the checkpoint {folder} is inconsistent (rollouts made: {state.made}, trained: {state.version}, queued: "
            f"{len(state.queue)}; prompts used: {state.place}): prompts would be repeated or skipped",
            try_this="an older checkpoint, or start over without --load_checkpoint",
        )
    return state


def outcome_of(controller: Controller, num_prompts: int) -> Outcome:
    """Return the run's results so far, for the card of a model that is saved now."""
    return Outcome(
        rows=num_prompts,
        eval_rows=len(controller.eval_prompts),
        step=controller.state.version,
        train=controller.last,
        evaluation=controller.last_evaluation,
    )


async def save_models(controller: Controller, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> Path:
    """Save the trained policy and, if requested, the critic; return the policy's folder.

    If one of them could not be saved in its folder, the error is raised only after the other has been saved as well.
    """
    config, workers = controller.config, controller.workers
    folder, fallback = Path(config.checkpoints.save_path), Path(config.checkpoints.ckpt_path) / checkpoint.MODEL
    outcome = outcome_of(controller, num_prompts)
    card = partial(training_card, config, outcome)
    savings = [await save_finished(workers.export, tokenizer, card, folder, fallback)]
    if config.critic.save_value_network and uses_critic(config):
        places = [path.with_name(f"{path.name}_critic") for path in (folder, fallback)]
        card = partial(training_card, config, outcome, folder=places[0], kind=Kind.CRITIC)
        savings.append(await save_finished(workers.export_critic, tokenizer, card, *places))
    for saving in savings:
        saving.must_be_in_place()
    return folder


async def save_finished(
    write: WriteModel, tokenizer: PreTrainedTokenizerBase, card: MakeCard, folder: Path, fallback: Path
) -> FinalSave:
    """Export a trained model to `folder`, or elsewhere if that disk is full or not writable."""
    saving = FinalSave(folder, fallback)
    for attempt in saving.attempts():
        with attempt as aside:
            await fill_model_folder(write, tokenizer, card, aside)
    return saving


async def fill_model_folder(write: WriteModel, tokenizer: PreTrainedTokenizerBase, card: MakeCard, aside: Path) -> None:
    await write(aside)
    tokenizer.save_pretrained(aside)
    write_card(aside, card)
