"""Signs that a supervised run is going wrong, found in the numbers that it computes anyway.

A check gets the numbers of each step and returns the lines to print. A line describes the problem and a remedy, and
appears once per run. The thresholds are far outside the range of healthy runs, because users ignore warnings that are
often wrong. `rl/health.py` is the counterpart for reinforcement learning.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

USUAL = 50  # recent steps that a gradient norm is compared with
FEWEST = 20  # steps before the first comparison: norms change quickly at the start
SPIKE = 20.0  # factor above the median of the recent norms; in healthy runs they vary by a factor of 2 to 5
NEW_HIGH = 5.0  # factor above the highest recent norm; when learning begins, norms may triple at each step
WINDOW = 100  # steps that a mean loss covers: ten times less noise than one batch


@dataclass
class NormWatch:
    """Comparison of each gradient norm with the recent ones of the same model."""

    clipped: bool  # whether --max_norm limits the update
    model: str = "the "  # such as "the critic's "
    rate_flag: str = "--learning_rate"
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    reported: bool = False

    def check(self, step: int, norm: float | None) -> list[str]:
        """Return a line if the norm is a spike; `norm` is None if the step was skipped."""
        if norm is None or self.reported:
            return []
        usual = median(self.norms) if len(self.norms) >= FEWEST else 0.0
        highest = max(self.norms, default=0.0)
        self.norms.append(norm)
        if not usual or norm < SPIKE * usual or norm < NEW_HIGH * highest:
            return []
        self.reported = True
        limited = "--max_norm limits the update" if self.clipped else "nothing limits the update (--max_norm 0)"
        advice = "" if self.clipped else "--max_norm 1, "
        return [
            f"step {step}: {self.model}gradient norm is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.2g}; "
            f"{limited}. If this happens again, try: {advice}a smaller {self.rate_flag} or a larger --train_batch_size"
        ]


@dataclass
class SupervisedHealth:
    """Checks on the loss and the gradient norm of a supervised run, from its first step."""

    clipped: bool
    watches_loss: bool = True
    first: list[float] = field(default_factory=list)  # losses of the first steps
    recent: list[float] = field(default_factory=list)  # losses since the last comparison
    reported: bool = False

    def __post_init__(self) -> None:
        self.norm = NormWatch(self.clipped)

    def check(self, step: int, *, loss: float, norm: float | None) -> list[str]:
        """Return the lines to print after a step."""
        return self.norm.check(step, norm) + (self._check_loss(step, loss) if self.watches_loss else [])

    def _check_loss(self, step: int, loss: float) -> list[str]:
        """Compare the mean loss of every `WINDOW` steps with that of the first ones; it is lower if the run learns.

        Later means are not compared with each other, because a plateau is normal.
        """
        if len(self.first) < WINDOW:
            self.first.append(loss)
            return []
        self.recent.append(loss)
        if len(self.recent) < WINDOW or self.reported:
            return []
        start, now = fmean(self.first), fmean(self.recent)
        self.recent.clear()
        if now < start:
            return []
        self.reported = True
        return [
            f"step {step}: the loss does not fall: {now:.4g} on average over the last {WINDOW} steps, {start:.4g} over "
            f"the first {WINDOW}. Try: another --learning_rate (the default suits full fine-tuning of a large model; "
            "LoRA and small models need a larger one), or check with --dry_run which tokens are learned"
        ]
