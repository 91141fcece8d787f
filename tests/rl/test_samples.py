"""Splitting samples into micro-batches: none is lost, budgets hold, and every rank has work."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openrlhf.data.collate import Layout
from openrlhf.data.shared_prefixes import Sequences, find_prefixes
from openrlhf.rl.samples import Batching, RolloutTokens
from openrlhf.types import Prompt
from tests.samples import make_trajectory

LAYOUT = Layout(packing=True, pad_id=0)
PROMPT, RESPONSE = 40, 20  # tokens
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def of_lengths(lengths):
    return Sequences([np.zeros(length, dtype=np.int32) for length in lengths])


def make_groups(count, samples, prompt=PROMPT, responses=(RESPONSE,)):
    """Samples of several prompts, interleaved; all responses to a prompt have one of the lengths in `responses`."""
    random = np.random.default_rng(0)
    prompts = random.integers(2, 1000, (count, prompt))
    return [
        np.concatenate([prompts[number % count], random.integers(2, 1000, responses[number % count % len(responses)])])
        for number in range(count * samples)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_batches_hold_the_experts_of_the_engine(packing):
    experts = np.arange(8, dtype=np.int16).reshape(4, 1, 2)
    routed = replace(make_trajectory(Prompt(0, "", (1,)), ids=(1, 2, 3, 4), mask=[True] * 4), routed_experts=experts)
    other = make_trajectory(Prompt(1, "", (1,)), ids=(1, 2, 3), mask=[True] * 3)
    layout = Layout(packing=packing, pad_id=0)
    found = RolloutTokens([other, routed], layout).batch([0, 1]).routed_experts
    missing = [[[-1, -1]]] * 3
    assert found.tolist() == ([missing + experts.tolist()] if packing else [[*missing, [[-1, -1]]], experts.tolist()])
    assert RolloutTokens([other], layout).batch([0]).routed_experts is None


@given(LENGTHS, st.integers(1, 16), st.integers(1, 5))
def test_by_count_every_sample_appears_once_and_every_rank_has_work(lengths, size, ranks):
    parts = Batching(LAYOUT, size, None, ranks).cut(of_lengths(lengths))
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert max(map(len, parts)) <= size
    assert len(parts) >= min(ranks, len(lengths))


@given(LENGTHS, st.integers(10, 100), st.integers(1, 5))
def test_by_tokens_the_budget_holds_and_every_rank_has_work(lengths, budget, ranks):
    parts = Batching(LAYOUT, 1, budget, ranks).cut(of_lengths(lengths))
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in part) <= budget or len(part) == 1 for part in parts)
    assert len(parts) >= min(ranks, len(lengths))


@pytest.mark.parametrize(("budget", "expected"), [(None, 4), (20, 4)])
def test_four_ranks_share_a_batch_that_fits_one(budget, expected):
    assert len(Batching(LAYOUT, 8, budget, 4).cut(of_lengths([5] * 4))) == expected


def computed(sequences, part):
    found = find_prefixes(Sequences([sequences[place] for place in part]))
    return sum(len(sequences[place]) for place in part) if found is None else len(found.kept)


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(30, 400)),
    st.integers(1, 4),
    st.integers(16, 60),
    st.integers(1, 300),
)
@example(1, 3, 1, 306, 1, 16, 145)  # three samples pay, but not the two that would fit with a shared prefix
def test_with_shared_prefixes_no_sample_is_lost_and_the_budget_holds(
    prompts, samples, size, budget, ranks, prompt, response
):
    sequences = make_groups(prompts, samples, prompt, (response,))
    parts = Batching(LAYOUT, size, budget, ranks, sharing_limit=10_000).cut(Sequences(sequences))
    assert sorted(place for part in parts for place in part) == list(range(prompts * samples))
    assert len(parts) >= min(ranks, len(sequences))
    for part in parts:
        assert budget is None or computed(sequences, part) <= budget or len(part) == 1


def test_one_sequence_beyond_the_limit_makes_the_budget_count_every_copy():
    sequences = make_groups(2, 4)
    sequences[0] = np.concatenate([sequences[0], np.arange(50)])  # no network shares a batch with it
    for limit, copies in ((len(sequences[0]), False), (len(sequences[0]) - 1, True)):
        parts = Batching(LAYOUT, 1, 200, sharing_limit=limit).cut(Sequences(sequences))
        whole = max(sum(len(sequences[place]) for place in part) for part in parts)
        assert (whole <= 200) == copies


def test_long_responses_to_one_prompt_are_divided_over_the_ranks():
    sequences = make_groups(8, 4, 100, (2000, *[100] * 7))
    parts = Batching(LAYOUT, 1, 100_000, 8, sharing_limit=10_000).cut(Sequences(sequences))
    assert len(parts) == 8
    assert max(computed(sequences, part) for part in parts) < 2500  # 8,100 if the group stayed together


def test_two_prompts_of_many_samples_give_every_rank_a_part_with_its_prompt():
    sequences = make_groups(2, 8, 400, (100,))
    parts = Batching(LAYOUT, 1, 100_000, 4, sharing_limit=10_000).cut(Sequences(sequences))
    assert sorted(computed(sequences, part) for part in parts) == [400 + 4 * 100] * 4


@pytest.mark.parametrize(("size", "budget"), [(4, None), (1, PROMPT + 4 * RESPONSE)])
def test_samples_of_a_prompt_stay_together_if_their_prefix_is_computed_once(size, budget):
    sequences = make_groups(3, 4)
    parts = Batching(LAYOUT, size, budget, sharing_limit=10_000).cut(Sequences(sequences))
    assert sorted(sorted(part) for part in parts) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_a_group_beyond_the_budget_is_divided_into_few_parts():
    parts = Batching(LAYOUT, 1, PROMPT + 2 * RESPONSE, sharing_limit=10_000).cut(Sequences(make_groups(1, 4)))
    assert sorted(map(len, parts)) == [2, 2]


def test_samples_of_one_prompt_are_shared_out_over_all_ranks():
    parts = Batching(LAYOUT, 8, 1000, 4, sharing_limit=10_000).cut(Sequences(make_groups(1, 4)))
    assert len(parts) == 4
