"""Progress over the rows of batch_inference, with throughput in tokens per second."""

from __future__ import annotations

import time

from openrlhf.inference.parts import OutputParts
from openrlhf.monitor import Progress


class RowProgress:
    """Progress of one process over its rows, including rows from an interrupted run."""

    def __init__(self, name: str, parts: OutputParts) -> None:
        done = len(parts.share) - len(parts.missing)
        self.progress = Progress(name, total=len(parts.share), done=done, unit="row")
        self.tokens = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start measuring speed; call this when the engine is ready, to exclude setup time."""
        self.started = time.perf_counter()
        self.progress.restart_clock()

    def advance(self, *, tokens: int) -> None:
        """Count one more row of `tokens` tokens."""
        self.tokens += tokens
        self.progress.advance({"tokens/s": self.tokens / self.seconds})

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.started, 1e-9)

    def close(self) -> None:
        self.progress.close()
