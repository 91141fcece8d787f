"""Samples on their way from episodes to micro-batches."""

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
    """A trajectory with everything that training needs beside its tokens; each array is [tokens]."""

    trajectory: Trajectory
    arrays: Mapping[str, NDArray[np.float32]]  # advantages, returns, old_log_probs, reference_log_probs, ...


@dataclass(frozen=True)
class Batching:
    """How samples become micro-batches: so many of them, or so many tokens."""

    layout: Layout
    size: int
    token_budget: int | None = None
    ranks: int = 1  # that share the micro-batches

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Places of the samples of each micro-batch; nothing is lost, an overlong sample is alone.

        Where there are samples enough, no rank is without one.
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
    """[tokens] of each trajectory; None if every token was drawn at the run's temperature."""
    if not any(item.temperature_factors for item in trajectories):
        return None
    return [np.array(item.temperature_factors or [1.0] * len(item.input_ids), np.float32) for item in trajectories]


def batch_trajectories(trajectories: Sequence[Trajectory], layout: Layout) -> Batch:
    factors = temperature_factors(trajectories)
    extras = {} if factors is None else {TEMPERATURE_FACTORS: layout.lay(factors, 1.0)}
    return layout.batch([token_row(trajectory) for trajectory in trajectories], extras)


def batch_samples(samples: Sequence[Sample], layout: Layout) -> Batch:
    names = samples[0].arrays.keys()
    extras = {name: layout.lay([sample.arrays[name] for sample in samples], 0.0) for name in names}
    return layout.batch([token_row(sample.trajectory) for sample in samples], extras)
