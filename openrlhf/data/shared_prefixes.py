"""Find the prefixes that sequences of a batch have in common, so that a network computes each of them once.

The samples of a prompt, or the two responses of a pair, start with the same tokens. `Sequences.groups` finds them, by
content, and `find_prefixes` describes a row that holds each shared prefix once. For the sequences `ppab`, `ppc`, `de`:

    row                  p p a b c d e
    segment bounds       0   2   4 5   7   each segment attends to itself, causally
    prefix bounds        0   2             the first segments
    continuation bounds      0     3       of each prefix, counted from the end of the prefixes: they also attend to it

`models.shared_prefix_attention` computes the attention in such a row, and `Network` maps its hidden states back to the
sequences. Micro-batches that keep the samples of a prompt together (`rl.samples.Batching`) save the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from openrlhf.types import SharedPrefixes

SHORTEST_PREFIX = 16  # minimum tokens of a shared prefix
LEAST_SAVING = 0.05  # minimum share of a group's tokens to save; below it, the second attention call costs more
MOST_LEVELS = 50  # maximum depth of prefixes within prefixes


class PrefixGroup(NamedTuple):
    """Sequences that share a prefix."""

    prefix: int  # length of the prefix in tokens
    members: list[int]

    @property
    def saved(self) -> int:
        """Number of tokens that sharing saves."""
        return self.prefix * (len(self.members) - 1)

    def pays(self, tokens: int) -> bool:
        """Return whether sharing the prefix saves enough; `tokens` is the length of all members together."""
        return self.prefix >= SHORTEST_PREFIX and self.saved >= LEAST_SAVING * tokens


class Sequences:
    """Token sequences, sorted once, so that shared prefixes can be found among all of them or within any batch."""

    def __init__(self, arrays: Sequence[NDArray[np.integer]]) -> None:
        self.arrays = arrays
        self.lengths = np.array([len(array) for array in arrays])

    @cached_property
    def neighbours(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of each sequence in sorted order, and the number of tokens that each place shares with the next."""
        arrays = self.arrays
        order = sorted(range(len(arrays)), key=lambda number: arrays[number].tobytes())  # any byte order will do
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        common = [common_tokens(arrays[one], arrays[other]) for one, other in pairwise(order)]
        return places, np.array([*common, 0])

    def groups(self, members: Sequence[int] | None = None) -> list[PrefixGroup]:
        """Group sequences that share a prefix; at least one token of each sequence is not shared.

        Without `members`, all sequences are grouped; the groups refer to members by their index in it. In sorted order,
        sequences with a common prefix are neighbours. A run of neighbours either shares one prefix, or is split at the
        two that have the least in common, whichever saves more: the samples of a prompt stay together even if all
        prompts start with the same instructions.
        """
        chosen = np.arange(len(self.arrays)) if members is None else np.asarray(members)
        lengths = self.lengths[chosen]
        long = np.flatnonzero(lengths > SHORTEST_PREFIX)
        if len(long) < 2:
            return []
        places, in_common = self.neighbours
        long = long[np.argsort(places[chosen[long]])]
        sorted_places, sorted_lengths = places[chosen[long]], lengths[long]
        # Two sequences share what all pairs of neighbours between them share, and never their last tokens.
        shared_by_pairs = np.minimum.reduceat(in_common, sorted_places)[:-1]
        most = np.minimum(sorted_lengths[:-1], sorted_lengths[1:]) - 1
        common, order = np.minimum(shared_by_pairs, most).tolist(), long.tolist()
        ends = with_total(sorted_lengths).tolist()

        def divide(first: int, last: int, level: int = 0) -> list[PrefixGroup]:
            """Return the groups of the sequences from `first` to `last` in the sorted order."""
            shared = common[first:last]
            whole = PrefixGroup(min(shared), order[first : last + 1])
            pays = whole.pays(ends[last + 1] - ends[first])
            # Each part saves at most what its neighbours share.
            if pays and whole.saved > sum(shared) - whole.prefix * shared.count(whole.prefix):
                return [whole]
            parts: list[PrefixGroup] = []
            if level < MOST_LEVELS:
                cuts = [first + place for place, tokens in enumerate(shared) if tokens == whole.prefix]
                for start, end in zip([first, *(cut + 1 for cut in cuts)], [*cuts, last], strict=True):
                    if start < end:
                        parts += divide(start, end, level + 1)
            return [whole] if pays and whole.saved > sum(part.saved for part in parts) else parts

        return divide(0, len(order) - 1)


def find_prefixes(sequences: Sequences, chosen: Sequence[int] | None = None) -> SharedPrefixes | None:
    """Return the row that computes the prefixes shared by the chosen sequences once; None if that would save little."""
    groups = sequences.groups(chosen)
    if not groups:
        return None
    lengths = sequences.lengths if chosen is None else sequences.lengths[np.asarray(chosen)]
    starts = np.cumsum(lengths) - lengths  # start of each sequence in their concatenation
    members = np.array([member for group in groups for member in group.members])
    alone = np.delete(np.arange(len(lengths)), members)
    sizes, shared = np.array([(len(group.members), group.prefix) for group in groups]).T  # [groups] each
    first = members[np.cumsum(sizes) - sizes]  # [groups]: the sequence whose prefix is computed for all members
    own_shared = np.repeat(shared, sizes)  # [members]

    # The segments of the row: prefixes, continuations, then sequences that share nothing.
    segment_starts = np.concatenate([starts[first], starts[members] + own_shared, starts[alone]])
    segment_lengths = np.concatenate([shared, lengths[members] - own_shared, lengths[alone]])
    kept = ranges(segment_starts, segment_lengths)
    segments, prefixes = with_total(segment_lengths), with_total(shared)
    continuations = segments[len(groups) + with_total(sizes)] - prefixes[-1]

    # The tokens of each sequence are in two places of the row: those of its prefix, if any, and its own.
    prefix_starts, prefix_lengths, own_starts = np.zeros((3, len(lengths)), np.int64)  # [sequences] each
    prefix_starts[members], prefix_lengths[members] = np.repeat(prefixes[:-1], sizes), own_shared
    own_starts[np.concatenate([members, alone])] = segments[len(groups) : -1]
    both_lengths = np.stack([prefix_lengths, lengths - prefix_lengths], 1).ravel()  # [2 x sequences]
    places = ranges(np.stack([prefix_starts, own_starts], 1).ravel(), both_lengths)
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


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Concatenate the ranges [start, start + length)."""
    ends = np.cumsum(lengths)
    found = np.repeat((starts - ends + lengths).astype(np.int32), lengths)
    found += np.arange(ends[-1], dtype=np.int32)
    return found


def with_total(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each part, followed by the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths)])


def common_tokens(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Return the length of the common prefix of two sequences."""
    shortest = min(len(one), len(other))
    differs = one[:shortest] != other[:shortest]
    first = int(differs.argmax()) if shortest else 0  # 0 if they do not differ
    return first if shortest and differs[first] else shortest
