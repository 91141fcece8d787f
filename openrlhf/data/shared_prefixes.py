"""Find the prefixes that sequences of a batch have in common, so that a network computes each of them once.

The samples of a prompt, or the two responses of a pair, start with the same tokens. `find_prefixes` groups such
sequences, by content, and describes a row that holds each shared prefix once. For the sequences `ppab`, `ppc` and `de`:

    row                  p p a b c d e
    segment bounds       0   2   4 5   7   each segment attends to itself, causally
    prefix bounds        0   2             the first segments
    continuation bounds      0     3       of each prefix, counted from the end of the prefixes: they also attend to it

`models.shared_prefix_attention` computes the attention in such a row, and `Network` maps its hidden states back to the
sequences. Micro-batches that keep the samples of a prompt together (`rl.samples.Batching`) save the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from openrlhf.types import SharedPrefixes

SHORTEST_PREFIX = 16  # minimum tokens of a shared prefix
LEAST_SAVING = 0.05  # minimum share of a group's tokens to save; below it, the second attention call costs more
MOST_LEVELS = 50  # maximum depth of prefixes within prefixes

Sequences = Sequence[NDArray[np.integer]]


class PrefixGroup(NamedTuple):
    """Sequences that share a prefix."""

    prefix: int  # length of the prefix in tokens
    members: list[int]

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return self.prefix * (len(self.members) - 1)

    def pays(self, lengths: Sequence[int]) -> bool:
        """Return whether sharing the prefix saves enough; `lengths` are those of all sequences."""
        total = sum(lengths[member] for member in self.members)
        return self.prefix >= SHORTEST_PREFIX and self.saved >= LEAST_SAVING * total


def find_prefixes(sequences: Sequences) -> SharedPrefixes | None:
    """Return the row that computes shared prefixes once; None if that would save little."""
    groups = group_by_prefix(sequences)
    if not groups:
        return None
    total = sum(map(len, sequences))
    grouped = {member for _, members in groups for member in members}
    starts = [0, *accumulate(map(len, sequences))]  # where each sequence starts when all are concatenated
    places = np.empty(total, dtype=np.int64)  # [tokens]
    kept: list[NDArray[np.int64]] = []
    segments = [0]

    def add(first: int, last: int) -> int:
        """Append tokens of the sequences to the row as a segment, and return the segment's start."""
        start = segments[-1]
        kept.append(np.arange(first, last))
        places[first:last] = np.arange(start, start + last - first)
        segments.append(start + last - first)
        return start

    for length, members in groups:
        start = add(starts[members[0]], starts[members[0]] + length)
        for member in members[1:]:
            places[starts[member] : starts[member] + length] = np.arange(start, start + length)
    prefixes = list(segments)
    continuations = [0]
    for length, members in groups:
        for member in members:
            add(starts[member] + length, starts[member + 1])
        continuations.append(segments[-1] - prefixes[-1])
    for number in range(len(sequences)):
        if number not in grouped:
            add(starts[number], starts[number + 1])
    return SharedPrefixes(
        kept=torch.from_numpy(np.concatenate(kept)),
        places=torch.from_numpy(places),
        segment_bounds=torch.tensor(segments, dtype=torch.int32),
        prefix_bounds=torch.tensor(prefixes, dtype=torch.int32),
        continuation_bounds=torch.tensor(continuations, dtype=torch.int32),
        longest_sequence=max(map(len, sequences)),
        longest_segment=int(np.diff(segments).max()),
        longest_prefix=int(np.diff(prefixes).max()),
        longest_continuation=int(np.diff(continuations).max()),
        num_prefix_tokens=prefixes[-1],
        num_continuation_tokens=continuations[-1],
    )


def group_by_prefix(sequences: Sequences) -> list[PrefixGroup]:
    """Group sequences that share a prefix; each sequence keeps at least one token of its own.

    In sorted order, sequences with a common prefix are neighbours. A run of neighbours either shares one prefix or is
    split where its members have the least in common, whichever saves more: the samples of a prompt stay together even
    if all prompts start with the same instructions.
    """
    lengths = [len(sequence) for sequence in sequences]
    long = [number for number, length in enumerate(lengths) if length > SHORTEST_PREFIX]
    order = sorted(long, key=lambda number: sequences[number].astype(">u4").tobytes())
    common = [common_tokens(sequences[one], sequences[other]) for one, other in pairwise(order)]

    def divide(first: int, last: int, level: int = 0) -> list[PrefixGroup]:
        """Return the groups of the sequences from `first` to `last` in the sorted order."""
        if first == last:
            return []
        shared = common[first:last]
        whole = PrefixGroup(min(shared), order[first : last + 1])
        parts: list[PrefixGroup] = []
        if level < MOST_LEVELS:
            ends = [first + place for place, tokens in enumerate(shared) if tokens == whole.prefix]
            for start, end in zip([first, *(end + 1 for end in ends)], [*ends, last], strict=True):
                parts += divide(start, end, level + 1)
        return [whole] if whole.pays(lengths) and whole.saved > sum(part.saved for part in parts) else parts

    return divide(0, len(order) - 1) if order else []


def common_tokens(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Return the length of the common prefix of two sequences, excluding the last token of each."""
    most = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most
