"""Progress and metrics of a run on the console, and the interface of metric sinks.

`say` prints one line from anywhere in the package. A training loop holds a `Monitor`, which shows the progress of the
run and passes metrics to its sinks (`training.metric_sinks`). Evaluations and batch_inference use `Progress`
themselves. Progress is a bar on a terminal, with lines above it, and an occasional line in a log file. Only the main
process (rank 0) reports.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"
PAUSE = 10.0  # seconds between lines about progress in a log file
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<LEFT, {rate_fmt}{postfix}]"
BRIEF_DELAY = 1.0  # seconds before the bar of a part of a run appears, so that short parts do not flicker
# Quoted text must not move the cursor, set the clipboard or retitle the window; only line breaks and tabs take effect.
CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in CONTROLS if chr(code) not in "\n\t"}


def is_main_process() -> bool:
    """Return whether this process reports: launchers set RANK, which is 0 or unset in the main process."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print one line to stderr, which keeps stdout free for piping; only the main process prints.

    Control characters are escaped, because a message may quote a model, a server or a dataset. If there is a
    progress bar, the line appears above it.
    """
    if not is_main_process():
        return
    text = f"openrlhf: {line.translate(SHOWN_CONTROLS)}"
    if Progress.open_bars:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def prints_into_notebook() -> bool:
    """Return whether stderr is the output of a notebook's cell, which can overwrite a line as a terminal can."""
    streams = sys.modules.get("ipykernel.iostream")  # tools import it even outside a notebook
    return streams is not None and isinstance(sys.stderr, streams.OutStream)


def shown_number(value: float) -> str:
    """Return a number in a readable form: four digits, and 10,040 rather than 1.004e+04."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def shown_count(count: int) -> str:
    """Return a large number in three digits, such as 546k, 1.24M or 7.62B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def shown_time(seconds: float) -> str:
    """Return a duration such as 40 s, 12 min or 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Progress(AbstractContextManager["Progress"]):
    """Progress of a loop, shown by the main process only: a bar on a terminal, otherwise a line every `PAUSE` seconds.

    If it is `brief` (a part of a longer run, such as an evaluation), nothing of it remains: the bar disappears, and a
    log file gets no line at its end.
    """

    open_bars = 0  # bars on the terminal, which lines must not overwrite

    def __init__(
        self, name: str, *, total: int, done: int = 0, unit: str, hidden: bool = False, brief: bool = False
    ) -> None:
        self.name, self.total, self.done, self.unit, self.brief = name, total, done, unit, brief
        self.hidden = hidden or not is_main_process()
        self.shown: Mapping[str, float] = {}
        self.counted = 0  # updates since the start, for the rate
        self.outside = 0.0  # seconds between updates that the rate leaves out
        self.told_at = self.started = time.monotonic()
        self.told = done  # progress in the last printed line
        self.bar: tqdm[NoReturn] | None = None
        notebook = prints_into_notebook()
        if not self.hidden and (notebook or sys.stderr.isatty()):
            from tqdm import tqdm  # imported late to keep flag parsing fast

            pause = 1.0 if notebook else 0.1  # seconds between updates
            delay = BRIEF_DELAY if brief else 0.0
            self.bar = tqdm(
                total=total,
                initial=done,
                desc=name,
                unit=unit,
                leave=not brief,
                mininterval=pause,
                miniters=0,  # also redraw if only the values next to the progress have changed
                delay=delay,
            )
            Progress.open_bars += 1

    def advance(self, shown: Mapping[str, float] | None = None) -> None:
        """Count one more unit, and show these values next to it."""
        self.show(shown or {}, count=1)

    def show(self, shown: Mapping[str, float], *, count: int = 0) -> None:
        """Show these values next to the progress, and count this many more units."""
        self.done += count
        self.counted += count
        self.shown = shown
        if self.bar is not None:
            self.bar.set_postfix({name: shown_number(value) for name, value in self.shown.items()}, refresh=False)
            # tqdm estimates the time left from the rate alone.
            left = self.bar.format_interval(self.seconds_left) if self.counted else "?"
            self.bar.bar_format = BAR.replace("LEFT", left)
            self.bar.update(count)
        elif not self.hidden and time.monotonic() - self.told_at >= PAUSE:
            self._tell()

    def _tell(self) -> None:
        """Print a line such as `train: step 20 of 100, 2.1 s/step, 3 min left, loss 0.52`."""
        line = f"{self.name}: {self.unit} {self.done} of {self.total}"
        if self.counted:
            line += f", {(time.monotonic() - self.started) / self.counted:.3g} s/{self.unit}"
            line += f", {shown_time(self.seconds_left)} left" if self.done < self.total else ""
        say(line + "".join(f", {name} {shown_number(value)}" for name, value in self.shown.items()))
        self.told, self.told_at = self.done, time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Time until the end, once a unit is counted; evaluations are expected to keep their share of it."""
        spent = time.monotonic() - self.started + self.outside
        return spent / self.counted * (self.total - self.done)

    def leave_out(self, seconds: float) -> None:
        """Leave time without possible progress out of the rate and, before the first update, out of the time left."""
        self.started += seconds
        self.outside += seconds if self.counted else 0.0
        if self.bar is not None:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds

    def restart_clock(self) -> None:
        """Exclude the time until now from the rate, such as the time to load a model."""
        self.leave_out(time.monotonic() - self.started)

    def close(self) -> None:
        """Show the final state and end; may be called more than once."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
            Progress.open_bars -= 1
        elif not (self.hidden or self.brief) and self.told != self.done:
            self._tell()
        self.hidden = True

    def __exit__(self, *_: object) -> None:
        self.close()


class StopTraining(Exception):
    """Raised by a sink or an `on_step` callback: end the run after this step, as if it were the last one."""


class Sink(Protocol):
    """Destination of metrics. `kind` is "train" or "eval"; `step` counts training steps from 1."""

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedSample:
    """A sample as a dashboard shows it, in a row of a table."""

    prompt: str
    response: str
    reward: float
    score: float
    truncated: bool


@runtime_checkable
class SampleSink(Protocol):
    """A sink that also takes samples of a training step."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None: ...


class Monitor(AbstractContextManager["Monitor"]):
    """The metric sinks of a run and its progress, which only the main process shows.

    As a context manager it closes both on exit, so that later messages appear below the finished bar. With
    `total_steps=0` no progress is shown.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, total_steps: int = 0, first_step: int = 0) -> None:
        self.sinks = list(sinks)
        self.stops = False  # True after a sink has raised StopTraining
        self.progress = Progress("train", total=total_steps, done=first_step, unit="step", hidden=total_steps == 0)

    def advance(self, shown: Mapping[str, float]) -> None:
        """Advance by one step and show the values of `shown` next to it."""
        self.progress.advance(shown)

    def leave_out(self, seconds: float) -> None:
        """Exclude time outside steps (evaluation, checkpoints) from the rate, but not from the time left."""
        self.progress.leave_out(seconds)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Pass metrics to all sinks; drop a sink whose disk or network fails, and print a message."""
        for sink in list(self.sinks):
            try:
                sink.log(kind, step, values)
            except StopTraining as reason:
                self.stops = True
                self.tell(f"step {step}: training ends here" + (f": {reason}" if str(reason) else ""))
            except OSError as error:
                self._drop(sink, error)

    @property
    def shows_samples(self) -> bool:
        """True if a sink takes samples; otherwise there is no need to decode any."""
        return any(isinstance(sink, SampleSink) for sink in self.sinks)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Pass samples of a training step to the sinks that take them; drop a sink that fails, as `log` does."""
        for sink in list(self.sinks):
            if isinstance(sink, SampleSink):
                try:
                    sink.log_samples(step, samples)
                except OSError as error:
                    self._drop(sink, error)

    def _drop(self, sink: Sink, error: OSError) -> None:
        self.sinks.remove(sink)
        self.tell(f"no more metrics are sent to {type(sink).__name__}: {error}. Training continues")

    def tell(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        say(line)

    def close(self) -> None:
        self.progress.close()
        for sink in list(self.sinks):
            try:
                sink.close()
            except OSError as error:
                self._drop(sink, error)

    def __exit__(self, *_: object) -> None:
        self.close()
