"""The assignment of rows to optimizer steps, ranks and micro-batches, as a pure function of seed and step.

There is no state to restore when a run resumes. `Order` returns the rows of a step, `share` those of a rank, and
`micro_batches` splits them. The supervised loop uses all of them, the RL loop only `permutation`. For example, a step
with five rows on two ranks in micro-batches of two:

    rank 0   [r0 r2] [r4]
    rank 1   [r1 r3] [filler]    because a sharded model runs on all ranks together
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """Rows reshuffled in each epoch; the last step of an epoch may be smaller than the others."""

    num_rows: int
    batch_size: int  # rows per optimizer step, over all ranks
    epochs: int
    seed: int
    max_steps: int | None = None  # stop after this many steps

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def rows(self, step: int) -> list[int]:
        """Return the row numbers of an optimizer step; `step` counts from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        shuffled = permutation(self.num_rows, self.seed, epoch)
        return shuffled[within * self.batch_size : (within + 1) * self.batch_size].tolist()

    def ends_epoch(self, step: int) -> bool:
        """Return True if `step` is the last of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0


@lru_cache(maxsize=2)
def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the row order of an epoch; cached, because every step of the epoch needs it."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def share(items: Sequence[T], rank: int, ranks: int) -> list[T]:
    """Return the items of a rank; the numbers of items per rank differ by at most one."""
    return list(items[rank::ranks])


def num_micro_batches(num_items: int, ranks: int, micro_size: int) -> int:
    """Return the number of micro-batches that every rank runs: as many as the rank with the most rows needs."""
    return math.ceil(math.ceil(num_items / ranks) / micro_size)


def micro_batches(items: Sequence[T], micro_size: int) -> list[list[T]]:
    """Split items into micro-batches; the last one may be smaller."""
    return [list(items[place : place + micro_size]) for place in range(0, len(items), micro_size)]
