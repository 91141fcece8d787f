"""The state of a run: everything in a checkpoint except weights, optimizers and random states.

The controller advances it, and `checkpoints.py` writes and reads it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

from openrlhf.algo.kl import AdaptiveKL, FixedKL
from openrlhf.rl.group_stream import StreamState
from openrlhf.rl.rollouts import Rollout


@dataclass
class State:
    """Progress of a run: everything that resuming needs besides weights and optimizer."""

    kl: FixedKL | AdaptiveKL
    version: int = 0  # version of the weights: the number of rollouts trained on
    made: int = 0  # non-empty rollouts generated
    place: int = 0  # prompts (files of a replay) that the rollouts so far have used
    failures: int = 0  # samples of all rollouts that failed and were skipped
    queue: deque[Rollout] = field(default_factory=deque)  # generated but not yet trained on
    stream: StreamState = field(default_factory=StreamState)  # groups of rollouts that are not complete
    best: float | None = None  # value of the best evaluation
    best_key: str | None = None  # name of that metric

    def plain(self) -> dict[str, object]:
        """Return the state as JSON values, without the samples, which `record.py` writes to separate files."""
        own = {name: value for name, value in vars(self).items() if name not in ("queue", "stream")}
        return own | {"kl": asdict(self.kl), "again": self.stream.unfinished, "drawn": self.stream.drawn}
