"""The six commands that train on a dataset (SFT, DPO, KTO, KD, RM, PRM): from config to saved model.

`run` loads the data, builds the parts of the method with `build`, and runs the common loop in `training.fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import SupervisedConfig
from openrlhf.data.collate import collate
from openrlhf.data.supervised import load_data
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import Sink, say
from openrlhf.training import checkpoint
from openrlhf.training.build import Built, build
from openrlhf.training.device import seed_dropout, seed_everything
from openrlhf.training.distributed import join
from openrlhf.training.explain import explain_hardware
from openrlhf.training.fit import Fit, Interrupted, Plan, Saving
from openrlhf.training.model_checks import check_models
from openrlhf.training.optim import only_warmup, schedule
from openrlhf.training.order import Order
from openrlhf.training.run_directory import explain_stop, find_checkpoint, make_monitor, shown_flags


@dataclass(frozen=True)
class Result:
    """Outcome of a finished run: the model's folder, its number of steps and its last metrics."""

    save_path: Path
    steps: int
    train: Mapping[str, float]
    evaluation: Mapping[str, float]


def run(config: SupervisedConfig, sinks: Sequence[Sink] = ()) -> Result:
    """Train, evaluate and save the model; the config must already be checked.

    `sinks` receive every metric, in addition to the usual logs.
    """
    disable_progress_bar()  # that of Transformers; the monitor shows its own
    check_models(config)
    device = join(config)
    explain_hardware(config, device)
    seed_everything(config.batches.seed, deterministic=config.batches.full_determinism)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    data = load_data(config, tokenizer)
    order = Order(
        num_rows=len(data.train),
        batch_size=config.batches.train_batch_size,
        epochs=config.batches.max_epochs,
        seed=config.batches.seed,
        max_steps=config.batches.max_steps,
    )
    if len(data.train) < order.batch_size:
        say(f"{len(data.train)} rows are fewer than --train_batch_size {order.batch_size}: a step takes what there is")
    plan = make_plan(config, order)
    explain_warmup(config, plan)
    built = build(config, tokenizer, device, soft_labels=data.soft_labels)
    seed_dropout(config.batches.seed, built.backend.process // config.sharding.ds_tensor_parallel_size)
    fit = Fit(
        backend=built.backend,
        objective=built.objective,
        collate=partial(collate, packing=config.batches.packing_samples, pad_id=tokenizer.pad_token_id),
        rows=data.train,
        eval_rows=data.evaluation,
        plan=plan,
        export=lambda folder: save_model_folder(built, tokenizer, folder),
        summarise=built.summarise,
        on_evaluated=built.on_evaluated,
    )
    resume_from = find_checkpoint(config)
    first_step = fit.resume(resume_from) if resume_from else 0
    folder = Path(config.checkpoints.save_path)
    try:
        # The run writes nothing before this point, because any step above may still reject it.
        with make_monitor(config, order.total_steps, first_step, sinks) as fit.monitor:
            if first_step == 0:
                fit.evaluate(0)
            if first_step >= order.total_steps:
                fit.monitor.tell(f"the checkpoint is at step {first_step}: no steps are left to train")
            train = fit.run(first_step)
            save_model_folder(built, tokenizer, folder)
    except Interrupted as stop:
        say(explain_stop(stop))
        raise
    say(f"saved {folder}")
    return Result(folder, order.total_steps, train, fit.last_evaluation)


def explain_warmup(config: SupervisedConfig, plan: Plan) -> None:
    """Say so if all optimizer steps fall into the warm-up."""
    steps = plan.order.total_steps
    ratio = config.optimizer.lr_warmup_ratio
    line = only_warmup(plan.schedule, steps=steps, planned=steps, warmup_ratio=ratio, flag="--lr_warmup_ratio")
    if line:
        say(line)


def save_model_folder(built: Built, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Export the model and its tokenizer; all processes call it together."""
    with checkpoint.exporting(folder, built.backend) as aside:
        built.backend.export(aside)
        if built.backend.process == 0:
            tokenizer.save_pretrained(aside)


def make_plan(config: SupervisedConfig, order: Order) -> Plan:
    """Collect the settings of the training loop: schedule, checkpoints, evaluation and logging."""
    saving = config.checkpoints
    return Plan(
        order=order,
        micro_size=config.batches.micro_train_batch_size,
        learning_rate=config.optimizer.learning_rate,
        schedule=schedule(
            config.optimizer.lr_scheduler,
            warmup_ratio=config.optimizer.lr_warmup_ratio,
            total_steps=order.total_steps,
            min_lr_ratio=config.optimizer.min_lr_ratio,
        ),
        saving=Saving(
            root=Path(saving.ckpt_path),
            every=saving.save_steps,
            keep=saving.max_ckpt_num,
            max_gib=saving.max_ckpt_mem,
            resumable=not saving.disable_ds_ckpt,
            export_too=saving.save_hf_ckpt,
        ),
        eval_every=config.logs.eval_steps,
        log_every=config.logs.logging_steps,
        settings=shown_flags(config),
    )
