"""Progress bar over the rows of batch_inference, with throughput in tokens per second."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from openrlhf.monitor import is_main_process


class Progress:
    """Progress of one process over its share of the rows; only the main process shows its bar."""

    def __init__(self, name: str, *, total: int, done: int) -> None:
        pause = 0.1 if sys.stderr.isatty() else 10  # seconds; in a log file every refresh adds a line
        self.bar: Any = tqdm(
            total=total, initial=done, desc=name, unit="row", disable=not is_main_process(), mininterval=pause
        )
        self.tokens = 0
        self.begin()

    def begin(self) -> None:
        """Restart the clock, so that setup time does not count."""
        self.started = time.perf_counter()
        self.bar.unpause()

    def advance(self, *, tokens: int) -> None:
        """Count one more row of `tokens` tokens."""
        self.tokens += tokens
        self.bar.set_postfix({"tokens/s": f"{self.tokens / self.seconds:.0f}"}, refresh=False)
        self.bar.update()

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.started, 1e-9)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
