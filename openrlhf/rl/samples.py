"""The samples of a rollout, their values per token, and their division into micro-batches.

`RolloutTokens` holds the samples of a rollout. `Batching` divides them into micro-batches, and `RolloutTokens.batch`
makes a padded or packed batch of them. All functions work on whole arrays: a rollout may have 100 million tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrlhf.algo.balance import first_fit
from openrlhf.algo.balance import micro_batches as by_tokens
from openrlhf.data.collate import Layout
from openrlhf.data.shared_prefixes import PrefixGroup, find_prefixes, group_by_prefix
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
    return [part] if part.pays(lengths) else [PrefixGroup(0, [member]) for member in members]


@dataclass(frozen=True)
class RolloutTokens:
    """The samples of a rollout, one after the other.

    A value for each token, such as an advantage, is a tensor [tokens] over all samples: padding a rollout to its
    longest sample would multiply its memory. `bounds` are the offsets of the samples.
    """

    trajectories: Sequence[Trajectory]
    bounds: NDArray[np.int64]  # [samples + 1]
    action_mask: Tensor  # [tokens] bool; False at the first token of a sample, which is never predicted
    layout: Layout

    @staticmethod
    def of(trajectories: Sequence[Trajectory], layout: Layout) -> RolloutTokens:
        bounds = np.cumsum([0, *(len(item.input_ids) for item in trajectories)])
        mask = np.concatenate([item.action_mask for item in trajectories])
        mask[bounds[:-1]] = False
        return RolloutTokens(trajectories, bounds, torch.from_numpy(mask), layout)

    @property
    def num_actions(self) -> int:
        return int(np.count_nonzero(self.action_mask.numpy()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, [samples]."""
        return np.diff(self.bounds)

    def last_actions(self) -> Tensor:
        """Return the place of each sample's last action token among all tokens, or -1 if it has none: [samples]."""
        mask, found = self.action_mask.numpy(), np.full(len(self.trajectories), -1)
        for number, (first, last) in enumerate(pairwise(self.bounds.tolist())):
            back = int(mask[first:last][::-1].argmax())  # stops at the first True
            if mask[last - 1 - back]:
                found[number] = last - 1 - back
        return torch.from_numpy(found)

    def join(self, arrays: Iterable[NDArray[np.float32]]) -> Tensor:
        """Combine one array [tokens] per sample into a tensor."""
        return torch.from_numpy(np.concatenate(list(arrays)))

    def split(self, values: Tensor, samples: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return the values [tokens] of each of the given samples, as views."""
        whole, places = values.numpy(), np.asarray(samples, dtype=np.intp)  # works even without samples
        pairs = zip(self.bounds[places].tolist(), self.bounds[places + 1].tolist(), strict=True)
        return [whole[first:last] for first, last in pairs]

    def batch(self, samples: Sequence[int]) -> RolloutBatch:
        """Make a batch of the given samples, for scoring."""
        items = [self.trajectories[number] for number in samples]
        sequences = [item.input_ids for item in items]  # [tokens] each

        def combine(given: Sequence[NDArray[np.generic] | None], default: float) -> Tensor | None:
            """Combine [tokens, ...] of each sample, if any has them; `default` replaces those of the others."""
            known = next((values for values in given if values is not None), None)
            if known is None:
                return None
            pairs = zip(given, sequences, strict=True)
            filled = [
                np.full((len(ids), *known.shape[1:]), default, known.dtype) if values is None else values
                for values, ids in pairs
            ]
            return self.layout.combine(filled, default)

        return RolloutBatch(
            input_ids=self.layout.combine(sequences, self.layout.pad_id),
            lengths=torch.tensor([len(ids) for ids in sequences]),
            target_mask=self.lay_out(self.action_mask, samples),
            prefixes=find_prefixes(sequences) if self.layout.sharing else None,
            temperature_factors=combine([item.temperature_factors for item in items], 1.0),
            routed_experts=combine([item.routed_experts for item in items], NOT_RECORDED),
        )

    def lay_out(self, values: Tensor, samples: Sequence[int], layout: Layout | None = None) -> Tensor:
        """Return the values [tokens] of the given samples as [rows, tokens], by default in the layout of batches."""
        return (layout or self.layout).combine(self.split(values, samples), 0)

    def restore(self, parts: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> Tensor:
        """Undo `lay_out`: return the values [tokens] of all samples from those of the micro-batches `parts`."""
        whole, bounds = np.empty(self.bounds[-1], np.float32), self.bounds.tolist()
        for samples, tensor in zip(parts, tensors, strict=True):
            rows, start = tensor.detach().float().cpu().numpy(), 0  # the place of a sample in a packed row
            for row, number in enumerate(samples):
                length = bounds[number + 1] - bounds[number]
                found = rows[0, start : start + length] if self.layout.packing else rows[row, :length]
                whole[bounds[number] : bounds[number + 1]] = found
                start += length
        return torch.from_numpy(whole)

    def chunks(self) -> Iterator[list[int]]:
        """Yield all samples in chunks of similar length, so that little of a chunk is padding."""
        lengths = self.lengths
        chunk: list[int] = []
        longest = 0
        for number in np.argsort(-lengths, kind="stable").tolist():
            if chunk and (len(chunk) + 1) * longest > CHUNK_TOKENS:
                yield chunk
                chunk = []
            longest = longest if chunk else int(lengths[number])
            chunk.append(number)
        yield chunk

    def put_back(self, padded: Tensor, samples: Sequence[int], values: Tensor) -> None:
        """Write padded values [samples, longest of them] into the values [tokens] of all samples."""
        for row, part in zip(padded.numpy(), self.split(values, samples), strict=True):
            part[:] = row[: len(part)]


def batch_trajectories(trajectories: Sequence[Trajectory], layout: Layout) -> RolloutBatch:
    """Make one batch of all trajectories, for scoring."""
    return RolloutTokens.of(trajectories, layout).batch(range(len(trajectories)))
