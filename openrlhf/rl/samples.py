"""The samples of a rollout, their values per token, and their division into micro-batches.

`RolloutTokens` holds the samples of a rollout. `Batching` divides them into micro-batches, and `RolloutTokens.batch`
makes a padded or packed batch of them. All functions work on whole arrays: a rollout may have 100 million tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrlhf.algo.balance import first_fit
from openrlhf.algo.balance import micro_batches as by_tokens
from openrlhf.data.collate import Layout
from openrlhf.data.shared_prefixes import PrefixGroup, Sequences, find_prefixes
from openrlhf.types import NOT_RECORDED, RolloutBatch, Trajectory

CHUNK_TOKENS = 2**22  # number of tokens, with padding, to compute values for at a time


@dataclass(frozen=True)
class Batching:
    """Division of samples into micro-batches: by number of samples or, with a token budget, by number of tokens."""

    layout: Layout
    size: int  # samples per micro-batch, if there is no token budget
    token_budget: int | None = None
    ranks: int = 1  # data-parallel ranks that share the micro-batches
    sharing_limit: int = 0  # longest sample, in tokens, whose shared prefix the models compute only once

    def cut(self, sequences: Sequences, chosen: Sequence[int] | None = None) -> list[list[int]]:
        """Return the indices of the sequences in each micro-batch, for all sequences or the chosen ones.

        No sample is dropped; a sample above the budget gets its own micro-batch. If there are enough samples, every
        rank gets at least one micro-batch. If prefixes are shared, samples of a prompt stay together, and the budget
        counts the tokens that are computed.
        """
        numbers = np.arange(len(sequences.lengths)) if chosen is None else np.asarray(chosen)
        count, lengths = len(numbers), sequences.lengths[numbers].tolist()
        groups = sequences.groups(chosen) if max(lengths) <= self.sharing_limit else []
        grouped = {place for group in groups for place in group.members}
        groups += [PrefixGroup(0, [place]) for place in range(count) if place not in grouped]
        if self.token_budget is None:
            order = numbers[[place for group in groups for place in group.members]].tolist()
            size = min(self.size, max(1, count // self.ranks))
            return [order[place : place + size] for place in range(0, count, size)]
        groups = divide_groups(groups, lengths, self.token_budget, self.ranks)
        tokens = [computed_tokens(group, lengths) for group in groups]
        rounds = -(-len(first_fit(tokens, self.token_budget)) // self.ranks)
        parts = by_tokens(tokens, self.token_budget, at_least=min(rounds * self.ranks, len(groups)))
        return [numbers[[place for number in part for place in groups[number].members]].tolist() for part in parts]


def computed_tokens(group: PrefixGroup, lengths: Sequence[int]) -> int:
    """Return the tokens that a model computes for a group."""
    return sum(lengths[place] for place in group.members) - group.saved


def divide_groups(groups: Sequence[PrefixGroup], lengths: Sequence[int], budget: int, ranks: int) -> list[PrefixGroup]:
    """Divide groups that exceed a token budget or one rank's share of the work; each part computes the prefix again.

    If there are enough samples, there is a group for every rank.
    """
    tokens = [computed_tokens(group, lengths) for group in groups]
    total = sum(tokens)
    divided: list[PrefixGroup] = []
    for group, computed in zip(groups, tokens, strict=True):
        parts = max(1, round(ranks * computed / total))  # number of ranks, in proportion to its tokens
        if parts == 1 and computed <= budget:
            divided.append(group)
            continue
        own = [lengths[place] - group.prefix for place in group.members]
        room = max(1, min(budget - group.prefix, max(-(-sum(own) // parts), *own)))
        for part in first_fit(own, room):
            divided += _part(group, [group.members[number] for number in part], lengths)
    while len(divided) < min(ranks, len(lengths)):
        largest = divided.pop(max(range(len(divided)), key=lambda number: len(divided[number].members)))
        half = len(largest.members) // 2
        for members in (largest.members[:half], largest.members[half:]):
            divided += _part(largest, members, lengths)
    return divided


def _part(group: PrefixGroup, members: list[int], lengths: Sequence[int]) -> list[PrefixGroup]:
    """Return a part of a group, or each of its samples alone if sharing the prefix would save too little."""
    part = PrefixGroup(group.prefix, members)
    pays = part.pays(sum(lengths[member] for member in members))
    return [part] if pays else [PrefixGroup(0, [member]) for member in members]


@dataclass(frozen=True)
class RolloutTokens:
    """The samples of a rollout, one after the other.

    A value for each token, such as an advantage, is a tensor [tokens] over all samples: padding a rollout to its
    longest sample would multiply its memory.
    """

    trajectories: Sequence[Trajectory]
    layout: Layout

    @cached_property
    def sequences(self) -> Sequences:
        """The tokens of the samples, which know their shared prefixes."""
        return Sequences([item.input_ids for item in self.trajectories])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, [samples]."""
        return self.sequences.lengths

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """The offsets of the samples, [samples + 1]."""
        return np.cumsum([0, *self.lengths])

    @cached_property
    def action_mask(self) -> Tensor:
        """The action tokens, [tokens] bool; never the first token of a sample, which is not predicted."""
        mask = np.concatenate([item.action_mask for item in self.trajectories])
        mask[self.bounds[:-1]] = False
        return torch.from_numpy(mask)

    @property
    def num_actions(self) -> int:
        return int(np.count_nonzero(self.action_mask.numpy()))

    @property
    def last_actions(self) -> Tensor:
        """The place of each sample's last action token among all tokens, or -1 if it has none: [samples]."""
        mask, last = self.action_mask.numpy(), self.bounds[1:] - 1
        for number in np.flatnonzero(~mask[last]):  # most samples end with an action
            actions = np.flatnonzero(mask[self.bounds[number] : self.bounds[number + 1]])
            last[number] = self.bounds[number] + actions[-1] if len(actions) else -1
        return torch.from_numpy(last)

    def chunks(self) -> list[list[int]]:
        """Divide the samples into chunks of similar length, so that little of a padded chunk is padding."""
        chunks: list[list[int]] = []
        longest = 0  # of the last chunk
        for number in np.argsort(-self.lengths, kind="stable").tolist():
            if not chunks or (len(chunks[-1]) + 1) * longest > CHUNK_TOKENS:
                chunks.append([])
                longest = int(self.lengths[number])
            chunks[-1].append(number)
        return chunks

    def batch(self, samples: Sequence[int]) -> RolloutBatch:
        """Make a batch of the given samples, for scoring."""
        items, lengths = [self.trajectories[number] for number in samples], self.lengths[np.asarray(samples)]
        optional: list[Tensor | None] = []
        for given, default in (
            ([item.temperature_factors for item in items], 1.0),
            ([item.routed_experts for item in items], NOT_RECORDED),
        ):
            known = next((values for values in given if values is not None), None)
            if known is None:
                optional.append(None)
                continue
            filled = [
                np.full((length, *known.shape[1:]), default, known.dtype) if values is None else values
                for values, length in zip(given, lengths.tolist(), strict=True)
            ]
            optional.append(self.layout.combine(filled, default))
        return RolloutBatch(
            input_ids=self.layout.combine([item.input_ids for item in items], self.layout.pad_id),
            lengths=torch.from_numpy(lengths),
            target_mask=self.lay_out(self.action_mask, samples),
            prefixes=find_prefixes(self.sequences, samples) if self.layout.sharing else None,
            temperature_factors=optional[0],
            routed_experts=optional[1],
        )

    def lay_out(self, values: Tensor, samples: Sequence[int], layout: Layout | None = None) -> Tensor:
        """Return the values [tokens] of the given samples as [rows, tokens], by default in the layout of batches."""
        whole, places = values.numpy(), np.asarray(samples)
        pairs = zip(self.bounds[places].tolist(), self.bounds[places + 1].tolist(), strict=True)
        return (layout or self.layout).combine([whole[first:last] for first, last in pairs], 0)

    def restore(
        self, parts: Sequence[Sequence[int]], tensors: Sequence[Tensor], layout: Layout | None = None
    ) -> Tensor:
        """Undo `lay_out`: return the values [tokens] of all samples from those of each of the `parts`."""
        packing = (layout or self.layout).packing
        whole, bounds = np.empty(self.bounds[-1], np.float32), self.bounds.tolist()
        for samples, tensor in zip(parts, tensors, strict=True):
            rows, start = tensor.detach().float().cpu().numpy(), 0  # the place of a sample in a packed row
            for row, number in enumerate(samples):
                length = bounds[number + 1] - bounds[number]
                found = rows[0, start : start + length] if packing else rows[row, :length]
                whole[bounds[number] : bounds[number + 1]] = found
                start += length
        return torch.from_numpy(whole)


def batch_trajectories(trajectories: Sequence[Trajectory], layout: Layout) -> RolloutBatch:
    """Make one batch of all trajectories, for scoring."""
    return RolloutTokens(trajectories, layout).batch(range(len(trajectories)))
