"""The six commands that train on a dataset (SFT, DPO, KTO, KD, RM, PRM): from config to saved model.

`run` checks the models, joins the other processes, loads the data, builds network, backend and objective with `build`,
and runs the common loop of `training.fit`. It is called by the commands and by Python code; the reinforcement-learning
counterpart is `rl.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import SupervisedConfig
from openrlhf.data.collate import collate
from openrlhf.data.supervised import SupervisedData, load_data
from openrlhf.errors import counted
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import Sink, say
from openrlhf.plan.estimate import LOADING, TRAINING
from openrlhf.signals import end_at_first_signal
from openrlhf.training import atomic_folder, checkpoint
from openrlhf.training.build import Built, build
from openrlhf.training.final_save import FinalSave
from openrlhf.training.fit import Fit, Interrupted
from openrlhf.training.hub import check_login, push_folder
from openrlhf.training.memory_check import check_memory, detect_machine, explain_memory
from openrlhf.training.model_card import MakeCard, Outcome, training_card, write_card
from openrlhf.training.optim import only_warmup, schedule
from openrlhf.training.order import Order
from openrlhf.training.preflight import check_models, explain_hardware
from openrlhf.training.process_state import present_objects_frozen
from openrlhf.training.processes import agree, join
from openrlhf.training.rng import seed_dropout, seed_everything
from openrlhf.training.run_directory import (
    explain_stop,
    find_checkpoint,
    hold_run_folders,
    make_monitor,
    shown_flags,
)


@dataclass(frozen=True)
class Result:
    """Outcome of a finished run."""

    save_path: Path  # folder of the model
    steps: int  # optimizer steps, including those before a resume
    train: Mapping[str, float]  # metrics of the last step
    evaluation: Mapping[str, float]  # metrics of the last evaluation; empty without one


def run(config: SupervisedConfig, sinks: Sequence[Sink] = ()) -> Result:
    """Train, evaluate and save the model; the config must already be checked.

    `sinks` receive every metric, in addition to the usual logs.
    """
    disable_progress_bar()  # Transformers' own bar; the monitor has another
    check_login(config.hub)
    check_models(config)
    device = join(config)
    explain_hardware(config, device)
    check_memory(config, detect_machine(device.type))
    seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)

    # Read everything that may contain a user's mistake before loading any model.
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    data = load_data(config, tokenizer)
    with hold_run_folders(config):
        result = train(config, data, tokenizer, device, sinks)
        push_folder(result.save_path, config.hub)
    return result


def train(
    config: SupervisedConfig,
    data: SupervisedData,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    sinks: Sequence[Sink],
) -> Result:
    """Build the models, run the loop from its start or from a checkpoint, and save the result."""
    order = make_order(config, len(data.train))
    scheduled = make_schedule(config, order.total_steps)
    machine = detect_machine(device.type)
    with end_at_first_signal():  # processes may wait in C++ for one that died, and nothing can be lost yet
        resume_from = find_checkpoint(config, lambda step: agree(step, device))
        # All processes build the models with the same seed; `seed_dropout` then changes it.
        with explain_memory(config, LOADING, machine):
            built = build(config, tokenizer, device, soft_labels=data.soft_labels)
    seed_dropout(config.batches.seed, built.backend.process // config.sharding.ds_tensor_parallel_size)

    fit = make_fit(config, data, tokenizer, order, scheduled, built)
    with end_at_first_signal():
        first_step = fit.resume(resume_from) if resume_from else 0
    try:
        # The run writes nothing before this point, because any step above may still reject it.
        monitor = make_monitor(config, order.total_steps, first_step, sinks)
        with explain_memory(config, TRAINING, machine), monitor as fit.monitor:
            if first_step == 0:
                fit.evaluate(0)
            if first_step >= order.total_steps:
                fit.monitor.tell(f"the checkpoint is at step {first_step}: no steps are left to train")
            with present_objects_frozen():
                last = fit.run(first_step)
    except Interrupted as stop:
        say(explain_stop(stop))
        raise
    outcome = Outcome(len(data.train), len(data.evaluation), fit.last_step, last, fit.last_evaluation)
    folder = Path(config.checkpoints.save_path)
    saving = FinalSave(folder, Path(config.checkpoints.ckpt_path) / checkpoint.MODEL, built.backend)
    for attempt in saving.attempts():
        with attempt as aside:
            fill_model_folder(built, tokenizer, aside, lambda: training_card(config, outcome))
    saving.must_be_in_place()
    say(f"saved {folder}")
    return Result(folder, fit.last_step, last, fit.last_evaluation)


def make_fit(
    config: SupervisedConfig,
    data: SupervisedData,
    tokenizer: PreTrainedTokenizerBase,
    order: Order,
    scheduled: Callable[[int], float],
    built: Built,
) -> Fit[Any, Any, Any]:
    """Connect the models with the rows and flags of the run; the kinds of rows and batches depend on the command."""

    def save_step(folder: Path) -> None:
        outcome = Outcome(len(data.train), len(data.evaluation), fit.last_step, evaluation=fit.last_evaluation)
        with atomic_folder.exporting(folder, built.backend) as aside:
            fill_model_folder(built, tokenizer, aside, lambda: training_card(config, outcome, folder=folder))

    fit = Fit(
        backend=built.backend,
        objective=built.objective,
        collate=partial(collate, packing=config.batches.packing_samples, pad_id=tokenizer.pad_token_id),
        rows=data.train,
        eval_rows=data.evaluation,
        order=order,
        schedule=scheduled,
        batches=config.batches,
        optimizer=config.optimizer,
        checkpoints=config.checkpoints,
        logs=config.logs,
        settings=shown_flags(config),
        export=save_step,
        summarise=built.summarise,
        on_evaluated=built.on_evaluated,
    )
    return fit


def make_order(config: SupervisedConfig, num_rows: int) -> Order:
    """Return the order of the training rows; print a line if they do not fill a batch."""
    order = Order(
        num_rows=num_rows,
        batch_size=config.batches.train_batch_size,
        epochs=config.batches.max_epochs,
        seed=config.batches.seed,
        max_steps=config.batches.max_steps,
    )
    if num_rows < order.batch_size:
        few = f"only {counted(num_rows, 'row')} for --train_batch_size {order.batch_size}"
        say(f"{few}: each step trains on all the data")
    return order


def make_schedule(config: SupervisedConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning-rate schedule; print a warning if all optimizer steps fall into its warm-up."""
    flags = config.optimizer
    warmup = flags.lr_warmup_ratio
    scheduled = schedule(
        flags.lr_scheduler, warmup_ratio=warmup, total_steps=total_steps, min_lr_ratio=flags.min_lr_ratio
    )
    line = only_warmup(scheduled, steps=total_steps, warmup_ratio=warmup)
    if line:
        say(line)
    return scheduled


def fill_model_folder(built: Built, tokenizer: PreTrainedTokenizerBase, aside: Path, card: MakeCard) -> None:
    """Export the model, its tokenizer and its card; all processes call it together."""
    built.backend.export(aside)
    if built.backend.process == 0:
        tokenizer.save_pretrained(aside)
        write_card(aside, card)
