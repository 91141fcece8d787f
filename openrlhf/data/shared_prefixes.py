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
from itertools import pairwise
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
        """Number of tokens that sharing saves."""
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
    lengths = np.array([len(sequence) for sequence in sequences])
    starts = np.cumsum(lengths) - lengths  # start of each sequence in their concatenation
    members = np.array([member for group in groups for member in group.members])
    alone = np.delete(np.arange(len(sequences)), members)
    sizes, shared = np.array([(len(group.members), group.prefix) for group in groups]).T  # [groups] each
    first = members[np.cumsum(sizes) - sizes]  # [groups]: the sequence whose prefix is computed for all members
    own_shared = np.repeat(shared, sizes)  # [members]

    # The segments of the row: prefixes, continuations, then sequences that share nothing.
    segment_starts = np.concatenate([starts[first], starts[members] + own_shared, starts[alone]])
    segment_lengths = np.concatenate([shared, lengths[members] - own_shared, lengths[alone]])
    kept = ranges(segment_starts, segment_lengths)
    segments, prefixes = with_total(segment_lengths), with_total(shared)
    continuations = segments[len(groups) + with_total(sizes)] - prefixes[-1]
    places = np.empty(lengths.sum(), dtype=np.int64)  # [tokens]
    places[kept] = np.arange(len(kept))
    places[ranges(starts[members], own_shared)] = ranges(np.repeat(prefixes[:-1], sizes), own_shared)
    return SharedPrefixes(
        kept=torch.from_numpy(kept),
        places=torch.from_numpy(places),
        segment_bounds=torch.from_numpy(segments.astype(np.int32)),
        prefix_bounds=torch.from_numpy(prefixes.astype(np.int32)),
        continuation_bounds=torch.from_numpy(continuations.astype(np.int32)),
        longest_sequence=int(lengths.max()),
        longest_segment=int(segment_lengths.max()),
        longest_prefix=int(shared.max()),
        longest_continuation=int(np.diff(continuations).max()),
        num_prefix_tokens=int(prefixes[-1]),
        num_continuation_tokens=int(continuations[-1]),
    )


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges [start, start + length)."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])


def with_total(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each part, followed by the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths)])


def group_by_prefix(sequences: Sequences) -> list[PrefixGroup]:
    """Group sequences that share a prefix; at least one token of each sequence is not shared.

    In sorted order, sequences with a common prefix are neighbours. A run of neighbours either shares one prefix, or is
    split at the two that have the least in common, whichever saves more: the samples of a prompt stay together even if
    all prompts start with the same instructions.
    """
    lengths = [len(sequence) for sequence in sequences]
    long = [number for number, length in enumerate(lengths) if length > SHORTEST_PREFIX]
    order = sorted(long, key=lambda number: sequences[number].tobytes())  # the byte order does not matter
    common = [common_tokens(sequences[one], sequences[other]) for one, other in pairwise(order)]

    def divide(first: int, last: int, level: int = 0) -> list[PrefixGroup]:
        """Return the groups of the sequences from `first` to `last` in the sorted order."""
        shared = common[first:last]
        whole = PrefixGroup(min(shared), order[first : last + 1])
        parts: list[PrefixGroup] = []
        if level < MOST_LEVELS:
            ends = [first + place for place, tokens in enumerate(shared) if tokens == whole.prefix]
            for start, end in zip([first, *(end + 1 for end in ends)], [*ends, last], strict=True):
                if start < end:
                    parts += divide(start, end, level + 1)
        return [whole] if whole.pays(lengths) and whole.saved > sum(part.saved for part in parts) else parts

    return divide(0, len(order) - 1) if len(order) > 1 else []


def common_tokens(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Return the length of the common prefix of two sequences, excluding the last token of each."""
    most = min(len(one), len(other)) - 1
    differs = one[:most] != other[:most]
    first = int(differs.argmax())  # 0 if they do not differ
    return first if differs[first] else most
