"""A bar over rows that says how many tokens a second they are."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from openrlhf.monitor import is_main_process


class Progress:
    """Shown by the main process, for its own share."""

    def __init__(self, name: str, *, total: int, done: int) -> None:
        pause = 0.1 if sys.stderr.isatty() else 10  # seconds; in a log file each showing is one more line
        self.bar: Any = tqdm(
            total=total, initial=done, desc=name, unit="row", disable=not is_main_process(), mininterval=pause
        )
        self.tokens = 0
        self.begin()

    def begin(self) -> None:
        """The time that it took to get ready does not count."""
        self.started = time.perf_counter()
        self.bar.unpause()

    def advance(self, *, tokens: int) -> None:
        """One more row, of so many tokens."""
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
