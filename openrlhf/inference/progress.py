"""Progress bar over the rows of batch_inference, with throughput in tokens per second."""

from __future__ import annotations

import time

from openrlhf.inference.parts import OutputParts
from openrlhf.monitor import open_bar


class RowProgress:
    """Progress of one process over its rows, including rows from an interrupted run."""

    def __init__(self, name: str, parts: OutputParts) -> None:
        self.bar = open_bar(name, total=len(parts.share), done=len(parts.share) - len(parts.missing), unit="row")
        self.tokens = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start measuring speed; call this when the engine is ready, to exclude setup time."""
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
