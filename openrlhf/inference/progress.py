"""Progress over the rows of batch_inference, with throughput in tokens per second."""

from __future__ import annotations

import time

from openrlhf.inference.parts import OutputParts
from openrlhf.monitor import Progress


class RowProgress(Progress):
    """Progress of one process over its rows, including rows from an interrupted run."""

    def __init__(self, name: str, parts: OutputParts) -> None:
        done = len(parts.share) - len(parts.missing)
        super().__init__(name, total=len(parts.share), done=done, unit="row")
        self.tokens = 0

    def count(self, tokens: int) -> None:
        """Count one more row of `tokens` tokens."""
        self.tokens += tokens
        self.advance({"tokens/s": self.tokens / self.seconds})

    @property
    def seconds(self) -> float:
        """Time since the engine was ready, when `restart_clock` was called."""
        return max(time.monotonic() - self.started, 1e-9)
