"""The supervised training loop, shared by all six supervised commands.

`training/supervised.py` builds a `Fit` from rows, an objective, a backend and the sections of flags that concern the
loop, resumes it if requested, and calls `run`. Each step runs

    order.rows -> collate -> objective.prepare -> backend.forward_backward -> loss is finite? -> backend.optim_step

on all ranks together. Between steps the loop evaluates, saves, logs and prints the warnings of `health`. On a signal,
`run` finishes the current step, writes a checkpoint and raises `Interrupted`. If a sink raises `StopTraining`, the
current step becomes the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch

from openrlhf.algo.reduce import Metrics, add_metrics
from openrlhf.config.sections.training import BatchFlags, CheckpointFlags, LogFlags, SupervisedOptimizerFlags
from openrlhf.errors import BackendError
from openrlhf.monitor import Monitor, Progress
from openrlhf.signals import SAVES, SAVES_NOTHING, stop_request
from openrlhf.training import atomic_folder, checkpoint
from openrlhf.training.backend import StepLosses, TrainBackend, values_of
from openrlhf.training.disk_space import has_room, skip_if_disk_fails
from openrlhf.training.health import SupervisedHealth
from openrlhf.training.objectives import Step, SupervisedObjective
from openrlhf.training.order import Order, micro_batches, num_micro_batches, share
from openrlhf.training.rng import load_rng, save_rng
from openrlhf.types import Batch, LabelledRow, PairRow, StepRow, TokenRow

Row = TypeVar("Row", bound=TokenRow | PairRow | LabelledRow | StepRow)
Collated = TypeVar("Collated", bound=Batch)
Prepared = TypeVar("Prepared", bound=Batch)

Summary = Callable[[Metrics], dict[str, float]]
Evaluated = Callable[[Mapping[str, float]], None]

LOSS_NAMES = ("loss", "gpt_loss", "kto_loss", "prm_loss")  # the first of these that an objective reports is its loss


class Interrupted(KeyboardInterrupt):
    """Raised when a run stops on a signal.

    `folder` is the checkpoint that it wrote; None if checkpoints are `disabled` or the disk has no room.
    """

    def __init__(self, folder: Path | None, *, disabled: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.disabled = disabled


@dataclass
class Fit(Generic[Row, Collated, Prepared]):
    """A supervised run: call `run` once, after `resume` if it continues from a checkpoint."""

    backend: TrainBackend
    objective: SupervisedObjective[Row, Collated, Prepared]
    collate: Callable[[Sequence[Row]], Collated]
    rows: Sequence[Row]
    eval_rows: Sequence[Row]
    order: Order  # order of `rows`
    schedule: Callable[[int], float]  # maps a step to the factor on the peak learning rate
    batches: BatchFlags
    optimizer: SupervisedOptimizerFlags
    checkpoints: CheckpointFlags
    logs: LogFlags
    settings: Mapping[str, object] = field(default_factory=dict)  # written into checkpoints and compared on resume
    monitor: Monitor = field(default_factory=Monitor)
    export: Callable[[Path], None] | None = None  # writes a model folder, for --save_hf_ckpt
    summarise: Summary = values_of  # turns evaluation metrics into the values to log
    on_evaluated: Evaluated | None = None  # called with those values, even if a checkpoint restored them
    last_evaluation: Mapping[str, float] = field(default_factory=dict)
    last_step: int = 0  # number of steps trained, including those before a resume
    run_id: str = field(default_factory=checkpoint.new_run_id)  # a resumed run keeps the id of its checkpoint

    def run(self, first_step: int = 0) -> dict[str, float]:
        """Train from `first_step` to the end; return the last step's metrics."""
        self.last_step = first_step
        taken = self.backend.steps_taken()
        if taken not in (None, first_step):
            raise BackendError(
                f"the optimizer is at step {taken}, but training would continue after step {first_step}: it would"
                " repeat or skip data, or train without the optimizer's state",
                try_this="an older checkpoint, or start over without --load_checkpoint",
            )
        save_steps, eval_steps, total = self.checkpoints.save_steps, self.logs.eval_steps, self.order.total_steps
        last: dict[str, float] = {}
        # A resumed run may have finished most of its learning, so its loss need not fall.
        health = SupervisedHealth(clipped=self.optimizer.max_norm > 0, watches_loss=first_step == 0)
        with stop_request(SAVES_NOTHING if self.checkpoints.disable_ds_ckpt else SAVES) as stop:
            for step in range(first_step, total):
                last = self._train(step)
                self.last_step = step + 1
                for line in health.check(step + 1, loss=last["loss_mean"], norm=last.get("grad_norm")):
                    self.monitor.tell(line)
                due = self.order.ends_epoch(step) if eval_steps == -1 else (step + 1) % eval_steps == 0
                if due:
                    self.evaluate(step + 1)
                is_last = step + 1 == total or self.backend.any_process(self.monitor.stops)
                if is_last and not due:  # always evaluate the final model
                    self.evaluate(step + 1)
                stopping = self.backend.any_process(stop.requested)
                if stopping or (save_steps > 0 and (step + 1) % save_steps == 0):
                    folder = self.save(step + 1)
                    if stopping:
                        raise Interrupted(folder, disabled=self.checkpoints.disable_ds_ckpt)
                if is_last:
                    break
        return last

    def _train(self, step: int) -> dict[str, float]:
        """Run one optimizer step and return its metrics."""
        started = time.perf_counter()
        places = self.order.rows(step)
        rows = [self.rows[place] for place in places]
        batches = self._batches(rows)  # this rank's
        result = self.backend.forward_backward(batches, self.objective)
        self._must_be_finite(result, places, step)  # before any weight changes
        scale = self.schedule(step)
        self.backend.steps_left = self.order.total_steps - step - 1
        norm = self.backend.optim_step(scale)
        utilization = self.backend.utilization()

        values = values_of(result.metrics)
        loss = next(name for name in LOSS_NAMES if name in values)
        values["loss_mean"] = values[loss]  # dashboards expect this name, although the mean covers only this step
        values |= {"acc_mean": values["acc"]} if "acc" in values else {}
        values["lr"] = self.optimizer.learning_rate * scale
        values |= {} if norm is None else {"grad_norm": norm}  # None: the step was skipped
        values |= self.backend.loss_scaling() | utilization
        tokens, seconds = sum(map(num_tokens, rows)), time.perf_counter() - started
        values |= {"timing/step_total": seconds, "timing/tokens_per_second": tokens / seconds}
        shown = {name: values[name] for name in (loss, "acc", "lr") if name in values}
        self.monitor.advance(shown | {"tok/s": tokens / seconds} | utilization)
        if (step + 1) % self.logs.logging_steps == 0:
            self.monitor.log("train", step + 1, values)
        return values

    def _batches(self, rows: Sequence[Row]) -> list[Prepared]:
        """Collate this rank's share of `rows` into micro-batches; fillers give all ranks the same number."""
        ranks, size = self.backend.data_parallel_size, self.batches.micro_train_batch_size
        mine = share(range(len(rows)), self.backend.rank, ranks)  # indices into `rows`
        batches = [self.collate([rows[place] for place in part]) for part in micro_batches(mine, size)]
        missing = num_micro_batches(len(rows), ranks, size) - len(batches)
        batches += [replace(self.collate(rows[:1]), filler=True) for _ in range(missing)]
        return self.objective.prepare(batches, Step(rows, mine, size), self.backend)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the objective on the whole evaluation set, including the last, smaller chunk."""
        if not self.eval_rows:
            return {}
        chunk, started = self.order.batch_size, time.perf_counter()
        parts: list[Metrics] = []
        places = range(0, len(self.eval_rows), chunk)
        with Progress("evaluate", total=len(places), unit="batch", brief=True) as progress:
            for place in places:
                batches = self._batches(self.eval_rows[place : place + chunk])
                parts.append(self.backend.evaluate(batches, self.objective))
                progress.advance()
        values = self.summarise(add_metrics(parts))
        self._keep(values)
        self.monitor.log("eval", step, values)
        shown = [f"{name} {value:.4f}" for name, value in values.items() if " " not in name]  # not those for dashboards
        self.monitor.tell(f"step {step}: " + ", ".join(shown))
        self.monitor.leave_out(time.perf_counter() - started)
        return values

    def _keep(self, values: Mapping[str, float]) -> None:
        """Store the results of a new or restored evaluation, and call `on_evaluated`."""
        self.last_evaluation = values
        if self.on_evaluated:
            self.on_evaluated(values)

    def save(self, step: int) -> Path | None:
        """Write a resumable checkpoint and, if requested, a model folder next to it; return the checkpoint.

        A folder that does not fit on the disk is skipped with a message, and training continues.
        """
        started = time.perf_counter()
        flags, root = self.checkpoints, Path(self.checkpoints.ckpt_path)
        folder, saved = checkpoint.step_folder(root, step), False
        what, ranks = f"the checkpoint of step {step}", self.backend
        if not flags.disable_ds_ckpt and self._has_room(root, what):
            with skip_if_disk_fails(what):
                with atomic_folder.writing(folder, ranks) as aside:
                    ranks.save(aside)
                    save_rng(aside, ranks.process)
                    if ranks.process == 0:
                        state = {"step": step, "num_rows": len(self.rows), "evaluation": dict(self.last_evaluation)}
                        checkpoint.write_state(aside, state | {"run": self.run_id, "settings": dict(self.settings)})
                if ranks.process == 0:
                    checkpoint.point_latest(root, step)
                saved = True
        if flags.save_hf_ckpt and self.export:
            with skip_if_disk_fails(f"the model folder of step {step}"):
                self.export(folder.with_name(f"{folder.name}_hf"))
        if ranks.process == 0:
            checkpoint.rotate(root, step=step, run=self.run_id, keep=flags.max_ckpt_num, max_gib=flags.max_ckpt_mem)
        self.monitor.leave_out(time.perf_counter() - started)
        return folder if saved else None

    def _has_room(self, root: Path, what: str) -> bool:
        """Return on all ranks whether a checkpoint fits on the disk of process 0."""
        needed = checkpoint.bytes_of_last(root, self.run_id) or self.backend.checkpoint_bytes()
        return bool(self.backend.agree(self.backend.process == 0 and has_room(root, needed, what)))

    def resume(self, folder: Path) -> int:
        """Restore the run from a checkpoint; return the next step."""
        state = checkpoint.read_state(folder)
        if state["num_rows"] != len(self.rows):
            raise BackendError(
                f"the data changed since the checkpoint {folder} was written: expected {state['num_rows']} rows, got"
                f" {len(self.rows)}; resuming would repeat or skip rows",
                try_this="the original data, or start over without --load_checkpoint",
            )
        self.backend.load(folder)
        load_rng(folder, self.backend.process)
        if state["evaluation"]:
            self._keep(state["evaluation"])
        self.run_id = state.get("run", self.run_id)
        return state["step"]

    def _must_be_finite(self, result: StepLosses, places: Sequence[int], step: int) -> None:
        """Raise the same error on all ranks if any micro-batch of any rank has a loss that is not finite."""
        ranks = self.backend.data_parallel_size
        bad = (~result.losses.isfinite()).nonzero().flatten().tolist()
        first = torch.zeros(ranks, dtype=torch.float64)  # [ranks]: first bad micro-batch of each, from 1; 0 if none
        first[self.backend.rank] = bad[0] + 1 if bad else 0
        first = self.backend.sum_over_ranks(first)
        if not first.any():
            return
        rank = int(first.nonzero()[0])
        number = int(first[rank])
        rows = micro_batches(share(places, rank, ranks), self.batches.micro_train_batch_size)[number - 1]
        raise BackendError(
            f"the loss of step {step + 1} is not finite in micro-batch {number} of {len(result.losses)}"
            f" (training rows {', '.join(str(row + 1) for row in rows)}); no weight was changed",
            try_this="a smaller --learning_rate, or check those rows",
        )


def num_tokens(row: TokenRow | PairRow | LabelledRow | StepRow) -> int:
    """Count the tokens that a row of any kind adds to the forward pass."""
    match row:
        case PairRow():
            return len(row.chosen.input_ids) + len(row.rejected.input_ids)
        case LabelledRow():
            return len(row.tokens.input_ids)
        case _:
            return len(row.input_ids)
