"""Samples, and how they are grouped into micro-batches.

A `Sample` is a trajectory with its training arrays; `Batching` decides which samples share a micro-batch, and the
`batch_...` functions lay these out as a `Batch`, padded or packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openrlhf.algo.balance import first_fit_count
from openrlhf.algo.balance import micro_batches as by_tokens
from openrlhf.data.collate import Layout
from openrlhf.types import TEMPERATURE_FACTORS, Batch, TokenRow, Trajectory


@dataclass(frozen=True)
class Sample:
    """A trajectory with all that training needs in addition to its tokens; each array is [tokens]."""

    trajectory: Trajectory
    arrays: Mapping[str, NDArray[np.float32]]  # advantages, returns, old_log_probs, reference_log_probs, ...


@dataclass(frozen=True)
class Batching:
    """How samples are divided into micro-batches: by number of samples or, with a budget, by number of tokens."""

    layout: Layout
    size: int  # samples, if there is no token budget
    token_budget: int | None = None
    ranks: int = 1  # data-parallel ranks that share the micro-batches

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the sample indices of each micro-batch. No sample is dropped; one above the budget is alone.

        If there are enough samples, every rank gets at least one.
        """
        count = len(lengths)
        if self.token_budget is not None:
            rounds = -(-first_fit_count(lengths, self.token_budget) // self.ranks)
            return by_tokens(lengths, self.token_budget, at_least=min(rounds * self.ranks, count))
        size = min(self.size, max(1, count // self.ranks))
        return [list(range(place, min(place + size, count))) for place in range(0, count, size)]


def token_row(trajectory: Trajectory) -> TokenRow:
    ids = np.array(trajectory.input_ids, dtype=np.int32)
    return TokenRow(ids, np.array(trajectory.action_mask, dtype=np.bool_))


def temperature_factors(trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]] | None:
    """Return the factors [tokens] of each trajectory; None if every token was sampled at the run's temperature."""
    if not any(item.temperature_factors for item in trajectories):
        return None
    return [np.array(item.temperature_factors or [1.0] * len(item.input_ids), np.float32) for item in trajectories]


def batch_trajectories(trajectories: Sequence[Trajectory], layout: Layout) -> Batch:
    """Make a batch for scoring, with temperature factors if tokens have their own."""
    factors = temperature_factors(trajectories)
    extras = {} if factors is None else {TEMPERATURE_FACTORS: layout.lay(factors, 1.0)}
    return layout.batch([token_row(trajectory) for trajectory in trajectories], extras)


def batch_samples(samples: Sequence[Sample], layout: Layout) -> Batch:
    """Make a batch for training, with all arrays of the samples as extras."""
    names = samples[0].arrays.keys()
    extras = {name: layout.lay([sample.arrays[name] for sample in samples], 0.0) for name in names}
    return layout.batch([token_row(sample.trajectory) for sample in samples], extras)
