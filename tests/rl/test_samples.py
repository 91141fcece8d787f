"""Splitting samples into micro-batches: none is lost, budgets hold, and every rank has work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.data.collate import Layout
from openrlhf.rl.samples import Batching

LAYOUT = Layout(packing=True, pad_id=0)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 16), st.integers(1, 5))
def test_by_count_every_sample_appears_once_and_every_rank_has_work(lengths, size, ranks):
    parts = Batching(LAYOUT, size, None, ranks).cut(lengths)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert max(map(len, parts)) <= size
    assert len(parts) >= min(ranks, len(lengths))


@given(LENGTHS, st.integers(10, 100), st.integers(1, 5))
def test_by_tokens_the_budget_holds_and_every_rank_has_work(lengths, budget, ranks):
    parts = Batching(LAYOUT, 1, budget, ranks).cut(lengths)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in part) <= budget or len(part) == 1 for part in parts)
    assert len(parts) >= min(ranks, len(lengths))


@pytest.mark.parametrize(("budget", "expected"), [(None, 4), (20, 4)])
def test_four_ranks_share_a_batch_that_fits_one(budget, expected):
    assert len(Batching(LAYOUT, 8, budget, 4).cut([5] * 4)) == expected
