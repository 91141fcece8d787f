"""The samples of a rollout as tensors, and their division into micro-batches.

`RolloutTokens` holds all tokens of a rollout as one tensor [samples, tokens]. `Batching` divides samples into
micro-batches, and `RolloutTokens.batch` makes a padded or packed batch of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openrlhf.algo.balance import first_fit
from openrlhf.algo.balance import micro_batches as by_tokens
from openrlhf.data.collate import Layout
from openrlhf.data.shared_prefixes import PrefixGroup, find_prefixes, group_by_prefix
from openrlhf.types import RolloutBatch, Trajectory


@dataclass(frozen=True)
class Batching:
    """Division of samples into micro-batches: by number of samples or, with a token budget, by number of tokens."""

    layout: Layout
    size: int  # samples per micro-batch, if there is no token budget
    token_budget: int | None = None
    ranks: int = 1  # data-parallel ranks that share the micro-batches
    sharing_limit: int = 0  # longest sample, in tokens, whose shared prefix the models compute only once

    def cut(self, sequences: Sequence[NDArray[np.integer]]) -> list[list[int]]:
        """Return the sample indices of each micro-batch.

        No sample is dropped; a sample above the budget gets its own micro-batch. If there are enough samples, every
        rank gets at least one micro-batch. If prefixes are shared, samples of a prompt stay together, and the budget
        counts the tokens that are computed.
        """
        count, lengths = len(sequences), [len(sequence) for sequence in sequences]
        groups = group_by_prefix(sequences) if max(lengths) <= self.sharing_limit else []
        grouped = {place for group in groups for place in group.members}
        groups += [PrefixGroup(0, [place]) for place in range(count) if place not in grouped]
        if self.token_budget is None:
            order = [place for group in groups for place in group.members]
            size = min(self.size, max(1, count // self.ranks))
            return [order[place : place + size] for place in range(0, count, size)]
        groups = divide_groups(groups, lengths, self.token_budget, self.ranks)
        tokens = [computed_tokens(group, lengths) for group in groups]
        rounds = -(-len(first_fit(tokens, self.token_budget)) // self.ranks)
        parts = by_tokens(tokens, self.token_budget, at_least=min(rounds * self.ranks, len(groups)))
        return [[place for number in part for place in groups[number].members] for part in parts]


def computed_tokens(group: PrefixGroup, lengths: Sequence[int]) -> int:
    """Return the tokens that a model computes for a group."""
    return sum(lengths[place] for place in group.members) - group.saved


def divide_groups(groups: Sequence[PrefixGroup], lengths: Sequence[int], budget: int, ranks: int) -> list[PrefixGroup]:
    """Divide groups that exceed a token budget or one rank's share of the work; each part computes the prefix again.

    If there are enough samples, there is a group for every rank.
    """
    tokens = [computed_tokens(group, lengths) for group in groups]
    divided: list[PrefixGroup] = []
    for group, computed in zip(groups, tokens, strict=True):
        own = [lengths[place] - group.prefix for place in group.members]
        parts = max(1, round(ranks * computed / sum(tokens)))  # number of ranks, in proportion to its tokens
        room = max(1, min(budget - group.prefix, max(-(-sum(own) // parts), *own)))
        divided += [_part(group, [group.members[number] for number in part], lengths) for part in first_fit(own, room)]
    while len(divided) < min(ranks, len(lengths)):
        largest = divided.pop(max(range(len(divided)), key=lambda number: len(divided[number].members)))
        half = len(largest.members) // 2
        divided += [_part(largest, members, lengths) for members in (largest.members[:half], largest.members[half:])]
    return divided


def _part(group: PrefixGroup, members: list[int], lengths: Sequence[int]) -> PrefixGroup:
    """Return a part of a group, without a prefix if the part would save too little."""
    part = PrefixGroup(group.prefix, members)
    return part if part.pays(lengths) else PrefixGroup(0, members)


@dataclass(frozen=True)
class RolloutTokens:
    """The tokens of a rollout, [samples, tokens], padded on the right."""

    input_ids: Tensor
    action_mask: Tensor  # bool; False at the first token, which is never predicted
    valid: Tensor  # bool; False on padding
    temperature_factors: Tensor | None  # None if all tokens were sampled at --temperature
    packing: bool  # True if batches are packed, False if padded
    sharing: bool  # True if batches describe the prefixes that their samples share

    @staticmethod
    def of(trajectories: Sequence[Trajectory], layout: Layout) -> RolloutTokens:
        action_mask = stack([item.action_mask for item in trajectories], torch.bool)
        action_mask[:, 0] = False
        factors = None
        if any(item.temperature_factors is not None for item in trajectories):
            ones = np.ones(max(len(item.input_ids) for item in trajectories), np.float32)
            own = [
                ones[: len(item.input_ids)] if item.temperature_factors is None else item.temperature_factors
                for item in trajectories
            ]
            factors = stack(own, torch.float32, fill=1.0)
        return RolloutTokens(
            input_ids=stack([item.input_ids for item in trajectories], torch.long, fill=layout.pad_id),
            action_mask=action_mask,
            valid=stack([np.ones(len(item.input_ids), np.bool_) for item in trajectories], torch.bool),
            temperature_factors=factors,
            packing=layout.packing,
            sharing=layout.sharing,
        )

    def batch(self, samples: Sequence[int]) -> RolloutBatch:
        """Make a batch of the given samples, for scoring."""
        valid = self.valid[list(samples)]
        valid = valid[:, valid.any(0)]  # [samples of the batch, longest of them]
        numbers = torch.arange(len(samples))[:, None].expand_as(valid)
        positions = torch.arange(valid.shape[1]).expand_as(valid)
        factors = self.temperature_factors
        return RolloutBatch(
            input_ids=self.lay_out(self.input_ids, samples),
            position_ids=positions[valid][None] if self.packing else torch.where(valid, positions, 0),
            sequence_ids=numbers[valid][None] if self.packing else torch.where(valid, numbers, -1),
            target_mask=self.lay_out(self.action_mask, samples),
            num_sequences=len(samples),
            prefixes=find_prefixes(self.sequences(samples)) if self.sharing else None,
            temperature_factors=None if factors is None else self.lay_out(factors, samples),
        )

    def sequences(self, samples: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return the tokens of the given samples, without padding."""
        ids, lengths = self.input_ids.numpy(), self.valid.sum(1).tolist()
        return [ids[number, : lengths[number]] for number in samples]

    def lay_out(self, values: Tensor, samples: Sequence[int]) -> Tensor:
        """Return the values [samples, tokens] of the given samples in the layout of a batch, [rows, tokens]."""
        chosen, valid = values[list(samples)], self.valid[list(samples)]  # [samples of the batch, tokens]
        return chosen[valid][None] if self.packing else chosen[:, valid.any(0)]

    def restore(self, parts: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> Tensor:
        """Undo `lay_out`: return [samples, tokens] from the micro-batches `parts`, zero on padding."""
        whole = torch.zeros(self.input_ids.shape)
        for samples, tensor in zip(parts, tensors, strict=True):
            valid = self.valid[list(samples)]  # [samples of the batch, tokens]
            found = tensor[0] if self.packing else tensor[valid[:, : tensor.shape[1]]]  # [valid tokens]
            whole[list(samples)] = torch.zeros(valid.shape).masked_scatter(valid, found.float().cpu())
        return whole


def stack(rows: Sequence[NDArray[Any]], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """Stack rows of different lengths into [rows, longest], padded on the right."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=fill)


def batch_trajectories(trajectories: Sequence[Trajectory], layout: Layout) -> RolloutBatch:
    """Make one batch of all trajectories, for scoring."""
    return RolloutTokens.of(trajectories, layout).batch(range(len(trajectories)))
