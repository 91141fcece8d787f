"""How micro-batches and samples are divided among ranks; this part of the cluster needs no Ray."""

import numpy as np
import pytest

from openrlhf.cluster.workers import share_out, share_trajectories
from openrlhf.data.collate import Layout
from openrlhf.types import Prompt, TokenRow
from tests.samples import make_trajectory


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


def test_samples_of_a_prompt_go_to_the_same_rank():
    samples = [sample(20, prompt) for _ in range(4) for prompt in range(6)]
    places, _ = share_trajectories(samples, 3)
    assert [len(own) for own in places] == [8, 8, 8]
    assert all(len({samples[place].prompt.index for place in own}) == 2 for own in places)


def test_the_work_on_shared_prompts_is_balanced_and_the_filler_is_the_cheapest_batch():
    prompt = np.arange(60, dtype=np.int32)
    rows = [np.concatenate([prompt, np.full(5, number, np.int32)]) for number in range(4)]
    shared = Layout(packing=True, pad_id=0).batch([TokenRow(row, np.ones(65, bool)) for row in rows])  # 80 computed
    _, shares = share_out([shared, batch(100), batch(90)], 2)
    (filler,) = [item for share in shares for item in share if item.filler]
    assert filler.prefixes is not None


def sample(length, prompt=0):
    return make_trajectory(Prompt(prompt, "", (1,)), (1,) * length, (True,) * length)
