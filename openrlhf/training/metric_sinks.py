"""Metric sinks: a file, TensorBoard, Weights & Biases and Trackio.

`run_directory.make_monitor` opens those that the flags select. Each is a `monitor.Sink`; the last two also take some
samples of each step (`monitor.SampleSink`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from pathlib import Path

from openrlhf.errors import ConfigError, counted
from openrlhf.monitor import METRICS_FILE, LoggedSample, say


def table_of(step: int, samples: Sequence[LoggedSample]) -> tuple[list[str], list[list[object]]]:
    """Return the columns and rows of a table of samples."""
    columns = [field.name for field in fields(LoggedSample)]
    return ["step", *columns], [[step, *(getattr(sample, name) for name in columns)] for sample in samples]


@contextmanager
def dashboard_failures() -> Iterator[None]:
    """Turn any error of a dashboard's library into an OSError, for which the monitor drops the sink."""
    try:
        yield
    except Exception as error:  # these libraries have no common base class, and training must not end here
        raise OSError(" ".join(str(error).split()).rstrip(".") or type(error).__name__) from error


class MetricsFile:
    """Sink that appends metrics to `run_dir/metrics.jsonl`, one JSON object per line.

    If the disk is full, lines are kept in memory until there is room again; the run continues.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        self.file = self.path.open("ab", buffering=0)
        self.waiting = b""  # complete lines that are not in the file yet

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        line = json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n"
        was_waiting, self.waiting = bool(self.waiting), self.waiting + line
        if (reason := self._write()) and not was_waiting:
            say(f"{self.path} cannot be written: {reason}. Training continues; metrics are kept in memory")

    def _write(self) -> str | None:
        """Write all waiting lines or none; return None, or the reason why nothing was written."""
        end = self.file.seek(0, os.SEEK_END)
        try:
            written = self.file.write(self.waiting)
        except OSError as error:
            return error.strerror
        if written != len(self.waiting):
            self.file.truncate(end)  # a partial line would break readers of the file
            return "the disk is full"
        self.waiting = b""
        return None

    def close(self) -> None:
        if self.waiting and (reason := self._write()):
            lost = counted(len(self.waiting.splitlines()), "line")
            say(f"{self.path} lacks its last {lost}, which could not be written: {reason}")
        self.file.close()


class TensorBoard:
    """Sink that writes TensorBoard scalars under train/ and eval/."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Sink that logs to a Weights & Biases run.

    A `key` of "true" uses the existing login. Without a network, WANDB_MODE=offline keeps the run in a local folder.
    """

    def __init__(
        self, key: str, *, name: str, project: str, group: str | None, org: str | None, config: dict[str, object]
    ) -> None:
        import wandb

        try:
            if key.lower() != "true" and os.environ.get("WANDB_MODE", "online") == "online":
                wandb.login(key=key)
            self.run = wandb.init(
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
        with dashboard_failures():
            self.run.log({f"{kind}/global_step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        import wandb

        columns, rows = table_of(step, samples)
        with dashboard_failures():
            table = wandb.Table(columns=[*columns], data=[*rows])  # copies: lists are invariant
            self.run.log({"train/global_step": step, "train/samples": table})

    def close(self) -> None:
        with dashboard_failures():
            self.run.finish()


class Trackio:
    """Sink that logs to a project of Trackio, on this machine; `trackio show` opens its dashboard.

    TRACKIO_DIR sets the folder; TRACKIO_SPACE_ID logs to a Space on the hub instead.
    """

    def __init__(self, project: str, *, name: str, config: dict[str, object]) -> None:
        with redirect_stdout(sys.stderr):  # it prints the location of its files
            import trackio

            measured = {"auto_log_gpu": False, "auto_log_cpu": False}  # only the run's own metrics
            self.run = trackio.init(project, name=name, config=config, embed=False, **measured)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        with dashboard_failures():
            self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        import trackio

        columns, rows = table_of(step, samples)
        with dashboard_failures():
            self.run.log({"train/samples": trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        import trackio

        # The run's own `finish` would not unregister it, so it would finish again at exit and print to stdout.
        with dashboard_failures(), redirect_stdout(sys.stderr):
            trackio.finish()
