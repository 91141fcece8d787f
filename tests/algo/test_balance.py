"""Balancing work by tokens: first-fit packing, Karmarkar-Karp partitions, micro-batches under a budget."""

import random
from collections.abc import Sequence
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algo.balance import first_fit, interleave, karmarkar_karp, micro_batches

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def naive_first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    rooms: list[int] = []
    for length in lengths:
        slot = next((i for i, room in enumerate(rooms) if room >= length), None)
        if slot is None or length > capacity:
            rooms.append(capacity - length if length <= capacity else -1)
        else:
            rooms[slot] -= length
    return rooms


def totals(lengths: Sequence[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def test_first_fit_matches_hand_computation():
    assert first_fit([5, 3, 7, 2, 6], 10) == [[0, 1, 3], [2], [4]]
    assert first_fit([], 10) == []


def test_an_item_longer_than_the_capacity_gets_its_own_bin():
    assert first_fit([4, 15, 3, 0, 20], 10) == [[0, 2, 3], [1], [4]]
    assert sorted(micro_batches([4, 15, 3, 0, 20], 10)) == [[0, 2, 3], [1], [4]]


@given(LENGTHS, st.integers(1, 60))
def test_first_fit_equals_a_search_through_all_bins(lengths, capacity):
    bins = first_fit(lengths, capacity)
    used = [total if total <= capacity else capacity + 1 for total in totals(lengths, bins)]
    assert used == [capacity - room for room in naive_first_fit(lengths, capacity)]
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 12))
def test_karmarkar_karp_loses_nothing_and_leaves_no_part_empty(lengths, k):
    parts = karmarkar_karp(lengths, k)
    assert len(parts) == k
    assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
    assert sum(bool(part) for part in parts) == min(k, len(lengths))


@given(LENGTHS.filter(len), st.integers(1, 12))
def test_karmarkar_karp_is_balanced(lengths, k):
    sums = totals(lengths, karmarkar_karp(lengths, k))
    assert max(sums) - min(sums) <= max(lengths)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_karmarkar_karp_into_two_parts_is_close_to_optimal(lengths):
    best = min(
        abs(sum(length if side else -length for length, side in zip(lengths, sides, strict=True)))
        for sides in product([0, 1], repeat=len(lengths))
    )
    first, second = totals(lengths, karmarkar_karp(lengths, 2))
    assert max(first, second) <= 7 / 6 * (sum(lengths) + best) / 2  # the known bound for two parts


def test_karmarkar_karp_matches_hand_computation():
    # differences: 8 and 7 leave 1, 6 and 5 leave 1, 4 and 1 leave 3, 3 and 1 leave 2 (the optimum is 0)
    lengths = [4, 5, 6, 7, 8]
    assert sorted(totals(lengths, karmarkar_karp(lengths, 2))) == [14, 16]


def test_karmarkar_karp_spreads_many_items_evenly():
    lengths = random.Random(0).choices(range(1, 4097), k=2048)
    sums = totals(lengths, karmarkar_karp(lengths, 16))
    assert max(sums) / min(sums) < 1.001


@pytest.mark.parametrize("samples", [4, 5, 9])
def test_every_worker_gets_something(samples):
    lengths = list(range(1, samples + 1))
    for parts in (karmarkar_karp(lengths, 4), interleave(lengths, 4)):
        assert all(parts)
        assert sorted(chain.from_iterable(parts)) == list(range(samples))


@given(LENGTHS, st.integers(1, 60), st.integers(1, 8))
def test_micro_batches_stay_within_the_token_budget(lengths, capacity, at_least):
    batches = micro_batches(lengths, capacity, at_least)
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    assert len(batches) >= min(at_least, len(lengths))
    for batch, total in zip(batches, totals(lengths, batches), strict=True):
        assert batch
        assert total <= capacity or len(batch) == 1


def test_interleave_matches_hand_computation():
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    shares = interleave(lengths, 2)
    assert [[lengths[index] for index in share] for share in shares] == [[8, 1, 6, 3], [7, 2, 5, 4]]


@given(LENGTHS, st.integers(1, 9))
def test_interleave_loses_nothing_and_keeps_counts_even(lengths, ranks):
    shares = interleave(lengths, ranks)
    assert sorted(chain.from_iterable(shares)) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@given(LENGTHS.filter(len), st.integers(1, 6))
def test_interleave_is_balanced(lengths, ranks):
    sums = totals(lengths, interleave(lengths, ranks))
    assert max(sums) - min(sums) <= 2 * max(lengths)


@pytest.mark.parametrize("function", [first_fit, karmarkar_karp, interleave])
def test_sizes_must_be_positive(function):
    with pytest.raises(ValueError, match="must be positive"):
        function([1], 0)
