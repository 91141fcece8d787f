"""The supervised training loop, shared by all six supervised commands.

`training/supervised.py` builds a `Fit` from rows, an objective, a backend and a `Plan`, resumes it if asked, and calls
`run`. Each step collates its rows, runs forward and backward, checks that the loss is finite, and updates the weights;
evaluation, checkpoints and logs happen in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch

from openrlhf.algo.reduce import Metrics, add_metrics
from openrlhf.errors import BackendError
from openrlhf.monitor import Monitor
from openrlhf.signals import SAVES, SAVES_NOTHING, stop_request
from openrlhf.training import checkpoint
from openrlhf.training.backend import StepLosses, TrainBackend, values_of
from openrlhf.training.objectives import Step, SupervisedObjective
from openrlhf.training.order import Order, micro_batches, num_micro_batches, share
from openrlhf.training.rng import load_rng, save_rng
from openrlhf.types import Batch, LabelledRow, PairRow, StepRow, TokenRow

Row = TypeVar("Row", bound=TokenRow | PairRow | LabelledRow | StepRow)
Collated = TypeVar("Collated", bound=Batch)
Prepared = TypeVar("Prepared", bound=Batch)

Summary = Callable[[Metrics], dict[str, float]]
Evaluated = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True)
class Saving:
    """When and where a run writes checkpoints."""

    root: Path
    every: int = -1  # steps; -1: only when interrupted
    keep: int = 3  # steps whose checkpoints are kept
    max_gib: float = float("inf")  # of all kept checkpoints together
    resumable: bool = True  # write weights and optimizer state
    export_too: bool = False  # also write a model folder per checkpoint


@dataclass(frozen=True)
class Plan:
    """The settings of a run; they do not change while it runs."""

    order: Order
    micro_size: int
    learning_rate: float
    schedule: Callable[[int], float]
    saving: Saving
    eval_every: int = -1  # -1: at the end of each epoch
    log_every: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)  # written into checkpoints and compared on resume

    def evaluates_after(self, step: int) -> bool:
        """Return True every `eval_every` steps or at an epoch's end, and after the last step, whose model is saved."""
        due = self.order.ends_epoch(step) if self.eval_every == -1 else (step + 1) % self.eval_every == 0
        return due or step + 1 == self.order.total_steps


class Interrupted(KeyboardInterrupt):
    """Raised when a run stops on request; `folder` is the checkpoint it wrote, if any."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder


@dataclass
class Fit(Generic[Row, Collated, Prepared]):
    """A supervised run; optionally `resume` it, then call `run` once."""

    backend: TrainBackend
    objective: SupervisedObjective[Row, Collated, Prepared]
    collate: Callable[[Sequence[Row]], Collated]
    rows: Sequence[Row]
    eval_rows: Sequence[Row]
    plan: Plan
    monitor: Monitor = field(default_factory=Monitor)
    export: Callable[[Path], None] | None = None
    summarise: Summary = values_of  # turns evaluation metrics into the values to log
    on_evaluated: Evaluated | None = None  # called with those values, also when a checkpoint restores them
    last_evaluation: Mapping[str, float] = field(default_factory=dict)

    def run(self, first_step: int = 0) -> dict[str, float]:
        """Train from `first_step` to the end; return the last step's metrics."""
        plan = self.plan
        last: dict[str, float] = {}
        with stop_request(SAVES if plan.saving.resumable else SAVES_NOTHING) as stop:
            for step in range(first_step, plan.order.total_steps):
                last = self._train(step)
                if plan.evaluates_after(step):
                    self.evaluate(step + 1)
                stopping = self.backend.anyone(stop.requested)
                if stopping or (plan.saving.every > 0 and (step + 1) % plan.saving.every == 0):
                    folder = self.save(step + 1)
                    if stopping:
                        raise Interrupted(folder)
        return last

    def _train(self, step: int) -> dict[str, float]:
        """Run one optimizer step and return its metrics."""
        plan, started = self.plan, time.perf_counter()
        places = plan.order.rows(step)
        batches = self._batches([self.rows[place] for place in places])
        result = self.backend.forward_backward(batches, self.objective)
        self._must_be_finite(result, places, step)
        scale = plan.schedule(step)
        norm = self.backend.optim_step(scale)
        values = with_means(values_of(result.metrics)) | {"lr": plan.learning_rate * scale}
        values |= {} if norm is None else {"grad_norm": norm}
        values |= self.backend.loss_scaling()
        tokens = sum(num_tokens(self.rows[place]) for place in places)
        self.monitor.advance(_shown(values) | {"tok/s": tokens / (time.perf_counter() - started)})
        if (step + 1) % plan.log_every == 0:
            self.monitor.log("train", step + 1, values)
        return values

    def _batches(self, rows: Sequence[Row]) -> list[Prepared]:
        """Collate this rank's share of `rows` into micro-batches, plus fillers so that all ranks have equally many."""
        ranks, size = self.backend.data_parallel_size, self.plan.micro_size
        mine = share(range(len(rows)), self.backend.rank, ranks)
        batches = [self.collate([rows[place] for place in part]) for part in micro_batches(mine, size)]
        missing = num_micro_batches(len(rows), ranks, size) - len(batches)
        batches += [replace(self.collate(rows[:1]), filler=True) for _ in range(missing)]
        return self.objective.prepare(batches, Step(rows, mine, size), self.backend)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the objective on the whole evaluation set, including the last, smaller chunk."""
        if not self.eval_rows:
            return {}
        chunk = self.plan.order.batch_size
        parts: list[Metrics] = []
        for place in range(0, len(self.eval_rows), chunk):
            batches = self._batches(self.eval_rows[place : place + chunk])
            parts.append(self.backend.evaluate(batches, self.objective))
        values = self.summarise(add_metrics(parts))
        self._keep(values)
        self.monitor.log("eval", step, values)
        self.monitor.tell(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        return values

    def _keep(self, values: Mapping[str, float]) -> None:
        self.last_evaluation = values
        if self.on_evaluated:
            self.on_evaluated(values)

    def save(self, step: int) -> Path | None:
        """Write a resumable checkpoint and, if requested, a model folder next to it."""
        saving = self.plan.saving
        folder = checkpoint.step_folder(saving.root, step)
        if saving.resumable:
            with checkpoint.writing(folder, self.backend) as aside:
                self._fill(aside, step)
            if self.backend.process == 0:
                checkpoint.point_latest(saving.root, step)
        if saving.export_too and self.export:
            self.export(folder.with_name(f"{folder.name}_hf"))
        if self.backend.process == 0:
            checkpoint.rotate(saving.root, keep=saving.keep, max_gib=saving.max_gib)
        return folder if saving.resumable else None

    def _fill(self, folder: Path, step: int) -> None:
        self.backend.save(folder)
        save_rng(folder, self.backend.process)
        if self.backend.process == 0:
            state = {"step": step, "num_rows": len(self.rows), "evaluation": dict(self.last_evaluation)}
            checkpoint.write_state(folder, state | {"settings": dict(self.plan.settings)})

    def resume(self, folder: Path) -> int:
        """Restore the run from a checkpoint; return the step to continue with."""
        state = checkpoint.read_state(folder)
        if state["num_rows"] != len(self.rows):
            raise BackendError(
                f"the checkpoint {folder} was made on {state['num_rows']} rows, but the data now has {len(self.rows)}: "
                "its place in the data cannot be found again"
            )
        self.backend.load(folder)
        load_rng(folder, self.backend.process)
        if state["evaluation"]:
            self._keep(state["evaluation"])
        return state["step"]

    def _must_be_finite(self, result: StepLosses, places: Sequence[int], step: int) -> None:
        """Raise the same error on all ranks if any micro-batch of any rank has a loss that is not finite."""
        ranks = self.backend.data_parallel_size
        bad = (~result.losses.isfinite()).nonzero().flatten().tolist()
        first = torch.zeros(ranks, dtype=torch.float64)  # first bad micro-batch of each rank, from 1; 0 if none
        first[self.backend.rank] = bad[0] + 1 if bad else 0
        first = self.backend.sum_over_ranks(first)
        if not first.any():
            return
        rank = int(first.nonzero()[0])
        number = int(first[rank])
        rows = micro_batches(share(places, rank, ranks), self.plan.micro_size)[number - 1]
        raise BackendError(
            f"the loss of step {step + 1} is not finite in micro-batch {number} of {len(result.losses)}"
            f" (training rows {', '.join(str(row + 1) for row in rows)}); no weight was changed",
            try_this="a smaller --learning_rate, or look at those rows",
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


def with_means(values: dict[str, float]) -> dict[str, float]:
    """Add `loss_mean` and `acc_mean`: here they equal the step's values, but dashboards may expect these names."""
    loss = {"loss_mean": values[_loss_name(values)]}
    return values | loss | ({"acc_mean": values["acc"]} if "acc" in values else {})


def _loss_name(values: Mapping[str, float]) -> str:
    return next(name for name in ("loss", "gpt_loss", "kto_loss", "prm_loss") if name in values)


def _shown(values: Mapping[str, float]) -> dict[str, float]:
    """Select the values to show in the progress bar: loss, accuracy and learning rate."""
    return {name: values[name] for name in (_loss_name(values), "acc", "lr") if name in values}
