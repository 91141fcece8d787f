"""How micro-batches and samples are divided among ranks; this part of the cluster needs no Ray."""

import numpy as np
import pytest

from openrlhf.cluster.workers import share_out, share_trajectories
from openrlhf.data.collate import Layout
from openrlhf.types import Prompt, TokenRow, Trajectory


def batch(length):
    return Layout(packing=True, pad_id=0).batch([TokenRow(np.ones(length, np.int32), np.ones(length, bool))])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_micro_batch_goes_to_one_rank_and_shares_have_equal_length(ranks):
    batches = [batch(length) for length in (9, 1, 7, 3)]
    places, shares = share_out(batches, ranks)
    assert sorted(place for own in places for place in own) == [0, 1, 2, 3]
    assert len({len(share) for share in shares}) == 1
    for own, share in zip(places, shares, strict=True):
        assert [batches[place] for place in own] == share[: len(own)]
        assert all(batch.filler for batch in share[len(own) :])


def test_the_tokens_of_ranks_are_balanced():
    places, _ = share_out([batch(length) for length in (9, 1, 7, 3)], 2)
    assert sorted(map(sorted, places)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_sample_goes_to_one_rank_and_every_rank_gets_a_sample(ranks):
    samples = [sample(length) for length in (9, 1, 7, 3)]
    places, shares = share_trajectories(samples, ranks)
    assert sorted(place for own in places for place in own) == [0, 1, 2, 3]
    for own, share in zip(places, shares, strict=True):
        assert share == ([samples[place] for place in own] or [samples[1]])


def sample(length):
    nothing = (0.0,) * length
    return Trajectory(Prompt(0, "", (1,)), (1,) * length, (True,) * length, nothing, 0.0, 0.0, False, 0)
