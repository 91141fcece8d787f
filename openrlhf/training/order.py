"""Which rows make up which optimizer step, on which rank, in which micro-batch: a function of seed and step alone.

Nothing here has state, so resuming is asking for the next step.
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
    """Rows shuffled anew each epoch; the last step of an epoch takes what is left."""

    num_rows: int
    batch_size: int
    epochs: int
    seed: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def rows(self, step: int) -> list[int]:
        """Row numbers of an optimizer step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        shuffled = permutation(self.num_rows, self.seed, epoch)
        return shuffled[within * self.batch_size : (within + 1) * self.batch_size].tolist()

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0


@lru_cache(maxsize=2)
def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch; kept, because every step of it asks."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def share(items: Sequence[T], rank: int, ranks: int) -> list[T]:
    """A rank's part of a step; parts differ by at most one item."""
    return list(items[rank::ranks])


def num_micro_batches(num_items: int, ranks: int, micro_size: int) -> int:
    """Micro-batches that each rank runs, so that all run equally many: the largest part decides."""
    return math.ceil(math.ceil(num_items / ranks) / micro_size)


def micro_batches(items: Sequence[T], micro_size: int) -> list[list[T]]:
    return [list(items[place : place + micro_size]) for place in range(0, len(items), micro_size)]
