"""What a run says, and to whom: the console, a metrics file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from openrlhf.errors import ConfigError

METRICS_FILE = "metrics.jsonl"


def is_main_process() -> bool:
    """True in the one process that speaks: a launcher numbers the others with RANK."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """One line for the person at the console; on stderr, so that output can be piped."""
    if is_main_process():
        print(f"openrlhf: {line}", file=sys.stderr, flush=True)  # noqa: T201


class Sink(Protocol):
    """A place that metrics go to. `kind` is train or eval; `step` counts optimizer steps from 1."""

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object a line in `run_dir/metrics.jsonl`; a resumed run drops what was written after its checkpoint."""

    def __init__(self, run_dir: Path, resumed_at: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        kept = [line for line in _lines(path) if _step(line) <= resumed_at] if resumed_at else []
        path.write_text("".join(kept))
        self.file = path.open("a")

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars under train/ and eval/."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder))

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases; without a network WANDB_MODE=offline keeps the run in a local folder."""

    def __init__(
        self, key: str, *, name: str, project: str, group: str | None, org: str | None, config: dict[str, Any]
    ) -> None:
        import wandb

        try:
            if key.lower() != "true" and os.environ.get("WANDB_MODE", "online") == "online":
                wandb.login(key=key)
            self.run: Any = wandb.init(
                entity=org, project=project, group=group, name=name, config=config, reinit="finish_previous"
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--use_wandb: {' '.join(str(error).split()).rstrip('.')}",
                try_this="WANDB_MODE=offline in the environment",
            ) from None
        for kind in ("train", "eval"):
            self.run.define_metric(f"{kind}/global_step")
            self.run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step")

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({f"{kind}/global_step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        self.run.finish()


class Monitor:
    """The sinks of a run and its progress bar; silent in every process but the main one.

    As a context it closes them at its end, so that what is said afterwards stands below the finished bar. Without
    steps it shows nothing.
    """

    def __init__(
        self, sinks: Sequence[Sink] = (), *, total_steps: int = 0, first_step: int = 0, name: str = "train"
    ) -> None:
        from tqdm import tqdm

        self.sinks = sinks
        hidden = not is_main_process() or total_steps == 0
        pause = 0.1 if sys.stderr.isatty() else 10  # seconds; in a log file each showing is one more line
        self.bar: Any = tqdm(
            total=total_steps, initial=first_step, desc=name, unit="step", disable=hidden, mininterval=pause
        )

    def advance(self, shown: Mapping[str, float]) -> None:
        """One more step done; `shown` stands beside the bar."""
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
        self.bar.update()

    def leave_out(self, seconds: float) -> None:
        """Takes time that belongs to no step (an evaluation, a checkpoint) out of the bar's rate and estimate."""
        if not self.bar.disable:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.log(kind, step, values)

    def tell(self, line: str) -> None:
        """A line above the bar."""
        if is_main_process():
            self.bar.write(f"openrlhf: {line}", file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(line: str) -> float:
    """The step of a line; one that a crash cut short belongs to none."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []
