"""The result of a training run, and the record that it passes to `on_step`."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from openrlhf.errors import BackendError
from openrlhf.monitor import METRICS_FILE

RecordKind: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one training step or of one evaluation."""

    kind: RecordKind
    step: int  # optimizer steps so far; in RL, rollouts trained so far
    metrics: Mapping[str, float]


OnStep: TypeAlias = Callable[[StepRecord], object]


@dataclass(frozen=True)
class StepCallback:
    """Sink that passes metrics to a user's `on_step`."""

    on_step: OnStep

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        try:
            self.on_step(StepRecord(cast(RecordKind, kind), step, dict(values)))
        except OSError as error:  # the monitor would take it for a full disk, and continue without the callback
            raise BackendError(f"on_step raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Do nothing: there is no file or connection to close."""


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A finished training run. It can be used as a path: wherever a model folder is expected, pass the result."""

    model: Path  # folder of the trained model
    run_dir: Path  # folder with config.json, metrics.jsonl and, in RL, the recorded rollouts
    checkpoints: tuple[Path, ...]  # resumable checkpoints, oldest first
    steps: int  # steps trained, including those before a resume; 0 for a dry run
    metrics: Mapping[str, float]  # metrics of the last training step
    evaluation: Mapping[str, float]  # metrics of the last evaluation; empty without one
    history: tuple[StepRecord, ...] = ()  # every logged step and evaluation, in order

    def curve(self, name: str, kind: RecordKind = "train") -> tuple[list[int], list[float]]:
        """Return the steps and values of a metric, for a plot: `plt.plot(*result.curve("reward"))`."""
        rows = [row for row in self.history if row.kind == kind and name in row.metrics]
        if not rows:
            known = sorted({metric for row in self.history if row.kind == kind for metric in row.metrics})
            problem = f"no {kind} metric {name!r}: expected one of {', '.join(known) or 'none'}"
            others = dict.fromkeys(row.kind for row in self.history if name in row.metrics)
            raise KeyError(problem + "".join(f". Try: curve({name!r}, kind={other!r})" for other in others))
        return [row.step for row in rows], [row.metrics[name] for row in rows]

    def __fspath__(self) -> str:
        return str(self.model)

    def __repr__(self) -> str:
        return "\n".join(["TrainResult", *(f"  {name:<13}{value}" for name, value in self._lines())])

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self._lines())
        return f"<table>{''.join(rows)}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("model", str(self.model)), ("run_dir", str(self.run_dir)), ("steps", f"{self.steps:,}")]
        if self.checkpoints:
            lines.insert(2, ("checkpoints", ", ".join(path.name for path in self.checkpoints)))
        for name, values in (("metrics", self.metrics), ("evaluation", self.evaluation)):
            shown = {metric: value for metric, value in values.items() if not metric.startswith("timing/")}
            if shown:
                lines.append((name, ", ".join(f"{metric} {value:.4g}" for metric, value in shown.items())))
        return lines


def read_history(run_dir: Path) -> tuple[StepRecord, ...]:
    """Read the metrics file of a run; empty if there is none, as in a dry run."""
    file = run_dir / METRICS_FILE
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return tuple(StepRecord(row.pop("kind"), row.pop("step"), row) for row in rows)
