"""Length balancing: split samples into micro-batches within a token budget, and over ranks.

First-fit decides how many micro-batches are needed, Karmarkar-Karp balances their lengths, and `interleave` assigns
samples to data-parallel ranks. All functions take lengths and return lists of indices into them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Part = tuple[int, int, list[int]]  # (total length, unique number to break ties, indices)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item, in order, into the first bin with enough space; return the indices in each bin. O(n log n).

    [5, 3, 7, 2, 6] with capacity 10 gives [[0, 1, 3], [2], [4]]. An item longer than `capacity` gets its own bin.
    """
    if capacity <= 0:
        raise ValueError(f"capacity must be positive, got {capacity}")
    bins: list[list[int]] = []
    # Free space of the bins as a tree of maxima (node n has the children 2n and 2n + 1), which finds the first bin with
    # enough space in O(log n).
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    free = [capacity] * (2 * leaves)
    for index, length in enumerate(lengths):
        if length > capacity:
            node = leaves + len(bins)  # a new bin, closed to other items
            free[node] = -1
        else:
            node = 1
            while node < leaves:
                node = 2 * node if free[2 * node] >= length else 2 * node + 1
            free[node] -= length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


def karmarkar_karp(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Return k index lists of nearly equal total length, by largest differencing (Karmarkar, Karp 1982); O(n log^2 n).

    Every item is in exactly one part, and no part is empty when there are at least k items.
    """
    if k <= 0:
        raise ValueError(f"the number of parts must be positive, got {k}")
    heap = [_Partial([(length, index, [index])], length).entry(k) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = one.merge(other, k) if len(one.parts) >= len(other.parts) else other.merge(one, k)
        heapq.heappush(heap, merged.entry(k, number))
    parts = [sorted(indices) for _, _, indices in heap[0][2].parts] if heap else []
    return sorted(parts) + [[] for _ in range(k - len(parts))]


def micro_batches(lengths: Sequence[int], capacity: int, at_least: int = 1) -> list[list[int]]:
    """Split items into balanced micro-batches within a token budget: as many as first-fit needs, or `at_least`.

    Karmarkar-Karp ignores the capacity, so a part that is too long is split again. Empty parts are omitted, so fewer
    items than `at_least` give fewer micro-batches.
    """
    count = max(len(first_fit(lengths, capacity)), at_least)
    batches: list[list[int]] = []
    for part in karmarkar_karp(lengths, count):
        cuts = first_fit([lengths[index] for index in part], capacity)
        batches += [[part[position] for position in cut] for cut in cuts]
    return batches


def interleave(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items to data-parallel ranks in chunks: long items alternate with short ones in reversed order.

    Lengths 8..1 over 2 ranks give [8, 1, 6, 3] and [7, 2, 5, 4]. Counts differ by at most one; the remainder goes to
    the ranks with the fewest tokens.
    """
    if ranks <= 0:
        raise ValueError(f"the number of ranks must be positive, got {ranks}")
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    whole = len(order) // ranks
    chunks = [order[i * ranks : (i + 1) * ranks] for i in range(whole)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for step in range(whole):
        chunk = chunks[step // 2] if step % 2 == 0 else chunks[whole - 1 - step // 2][::-1]
        for share, index in zip(shares, chunk, strict=True):
            share.append(index)
    lightest = sorted(shares, key=lambda share: sum(lengths[index] for index in share))
    for share, index in zip(lightest, order[whole * ranks :], strict=False):
        share.append(index)
    return shares


@dataclass
class _Partial:
    """A partition of some of the items, without empty parts, so that merging takes time only for the smaller side."""

    parts: list[Part]  # a heap, smallest first
    longest: int

    def entry(self, k: int, number: int | None = None) -> tuple[int, int, "_Partial"]:
        """Return a heap entry; partitions with the largest difference between longest and shortest part come first."""
        shortest = self.parts[0][0] if len(self.parts) == k else 0
        return shortest - self.longest, self.parts[0][1] if number is None else number, self

    def merge(self, other: "_Partial", k: int) -> "_Partial":
        """Merge the longest parts of `other` into the shortest parts of this partition, starting with empty parts."""
        longest_first = sorted(other.parts, reverse=True)
        empty = k - len(self.parts)
        fresh, paired = longest_first[:empty], longest_first[empty:]
        shortest = [heapq.heappop(self.parts) for _ in paired]
        for mine, theirs in zip(shortest, paired, strict=True):
            small, large = sorted((mine[2], theirs[2]), key=len)
            large.extend(small)
            fresh.append((mine[0] + theirs[0], mine[1], large))
        for part in fresh:
            heapq.heappush(self.parts, part)
        kept = self.longest if len(paired) < k else 0
        self.longest = max(kept, *(part[0] for part in fresh))
        return self
