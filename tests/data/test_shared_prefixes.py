"""Rows that hold each prefix shared by several sequences once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.data.shared_prefixes import LEAST_SAVING, SHORTEST_PREFIX, Sequences, find_prefixes

P, Q = list(range(100, 100 + SHORTEST_PREFIX)), list(range(200, 210 + SHORTEST_PREFIX))


def tokens_of(*sequences):
    return Sequences([np.array(sequence, dtype=np.int32) for sequence in sequences])


def groups_of(*sequences):
    return sorted((group.prefix, sorted(group.members)) for group in tokens_of(*sequences).groups())


def test_a_row_has_prefixes_then_continuations_then_other_sequences():
    sequences = tokens_of([*P, 1, 2], [8, 9], [*Q, 3], [*P, 4], [*Q, 5, 6, 7])
    found = find_prefixes(sequences)
    tokens = np.concatenate(sequences.arrays)
    assert tokens[found.kept.numpy()].tolist() == [*P, *Q, 1, 2, 4, 3, 5, 6, 7, 8, 9]
    p, q = len(P), len(Q)
    assert found.prefix_bounds.tolist() == [0, p, p + q]
    assert found.continuation_bounds.tolist() == [0, 3, 7]
    assert found.segment_bounds.tolist() == [0, p, *(p + q + end for end in (0, 2, 3, 4, 7, 9))]
    assert (found.num_prefix_tokens, found.num_continuation_tokens) == (p + q, 7)
    assert (found.longest_prefix, found.longest_continuation, found.longest_segment) == (q, 4, q)
    assert found.longest_sequence == q + 3


SEQUENCES = st.lists(  # few different tokens, so that long prefixes are shared
    st.builds(
        lambda first, prefix, rest: [first] * prefix + rest,
        st.integers(1, 2),
        st.integers(0, 40),
        st.lists(st.integers(1, 3), min_size=1, max_size=30),
    ),
    min_size=1,
    max_size=12,
)


@given(SEQUENCES, st.randoms())
def test_chosen_sequences_share_what_they_would_share_alone(sequences, random):
    chosen = random.sample(range(len(sequences)), random.randint(1, len(sequences)))
    found = tokens_of(*sequences).groups(chosen)
    alone = groups_of(*(sequences[number] for number in chosen))

    def contents(groups):  # equal sequences may swap places
        return sorted((prefix, sorted(sequences[chosen[place]] for place in members)) for prefix, members in groups)

    assert contents(found) == contents(alone)


@given(SEQUENCES)
def test_every_token_has_a_place_with_the_same_content_and_history(sequences):
    found = find_prefixes(tokens_of(*sequences))
    if found is None:
        return
    tokens = np.concatenate(tokens_of(*sequences).arrays)
    kept, places = found.kept.numpy(), found.places.numpy()
    assert tokens[kept][places].tolist() == tokens.tolist()
    segments, prefixes = found.segment_bounds.tolist(), found.prefix_bounds.tolist()
    continuations = [found.num_prefix_tokens + end for end in found.continuation_bounds.tolist()]
    start = 0
    for sequence in sequences:
        own = places[start : start + len(sequence)].tolist()
        start += len(sequence)
        ends = [next(end for end in segments if end > place) for place in own]
        last = [place for place, end in zip(own, ends, strict=True) if end == ends[-1]]
        assert last == list(range(last[0], last[-1] + 1))  # the sequence ends in its own segment ...
        before = own[: len(own) - len(last)]
        if before:  # ... after the prefix of the segment's group
            group = next(number for number, end in enumerate(continuations[1:]) if last[0] < end)
            assert before == list(range(prefixes[group], prefixes[group + 1]))


@given(SEQUENCES)
def test_groups_share_enough_tokens_and_leave_each_sequence_one(sequences):
    for group in tokens_of(*sequences).groups():
        own = [sequences[member] for member in group.members]
        assert len({tuple(sequence[: group.prefix]) for sequence in own}) == 1
        assert SHORTEST_PREFIX <= group.prefix < min(map(len, own))
        assert group.saved >= LEAST_SAVING * sum(map(len, own))


def test_samples_of_a_prompt_are_a_group_even_if_all_prompts_start_the_same():
    one, other = [*P, *Q, 1], [*P, *Q, 2, *Q]
    samples = [[*prompt, 10 + number, 5] for prompt in (one, other) for number in range(4)]
    assert groups_of(*samples) == [(len(one), [0, 1, 2, 3]), (len(other), [4, 5, 6, 7])]


def test_a_prompt_with_one_sample_joins_no_group_that_would_save_less():
    samples = [[*P, 1, 1], *([*P, *Q, 2, number] for number in range(3, 7))]
    assert groups_of(*samples) == [(len(P) + len(Q) + 1, [1, 2, 3, 4])]


@pytest.mark.parametrize(
    "sequences",
    [
        [[*P[:-1], 1], [*P[:-1], 2]],  # too short a prefix
        [[*P, *range(500)], [*P, *range(500, 1000)]],  # too little of the whole
        [[*P, 1]],
        [],
    ],
)
def test_prefixes_that_save_little_are_not_shared(sequences):
    assert find_prefixes(tokens_of(*sequences)) is None


def test_a_thousand_prefixes_within_prefixes_are_grouped():
    sequences = [[1] * length for length in range(1, 1500)]
    assert groups_of(*sequences)
