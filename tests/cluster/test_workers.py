"""Micro-batches over ranks, and weights compared on both sides: what a cluster does without Ray."""

import numpy as np
import pytest
import torch

from openrlhf.cluster.workers import share_out, share_trajectories
from openrlhf.data.collate import Layout
from openrlhf.errors import RolloutError
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.sync_proof import Sent, SyncProof, compare
from openrlhf.types import Prompt, TokenRow, Trajectory


def batch(length):
    return Layout(packing=True, pad_id=0).batch([TokenRow(np.ones(length, np.int32), np.ones(length, bool))])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_micro_batch_goes_to_one_rank_and_shares_are_equally_long(ranks):
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
def test_every_sample_goes_to_one_rank_and_no_rank_is_without(ranks):
    samples = [sample(length) for length in (9, 1, 7, 3)]
    places, shares = share_trajectories(samples, ranks)
    assert sorted(place for own in places for place in own) == [0, 1, 2, 3]
    for own, share in zip(places, shares, strict=True):
        assert share == ([samples[place] for place in own] or [samples[1]])


def sample(length):
    nothing = (0.0,) * length
    return Trajectory(Prompt(0, "", (1,)), (1,) * length, (True,) * length, nothing, 0.0, 0.0, False, 0)


def sums(**tensors):
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def test_weights_that_arrived_are_not_complained_about():
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    sent = Sent(tensors.items(), verify=True)
    assert dict(sent) == tensors
    compare(sent.checksums, sums(**tensors), "engine 0")


def test_what_is_missing_changed_or_unknown_is_named():
    one, other = torch.zeros(2), torch.ones(2)
    with pytest.raises(
        RolloutError, match=r"engine 0.*1 did not arrive \(b\).*1 arrived changed \(a\).*never sent \(c\)"
    ):
        compare(sums(a=one, b=one), sums(a=other, c=one), "engine 0")


@pytest.mark.parametrize(("every", "proved"), [(0, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 6])])
def test_syncs_are_proved_until_the_weights_have_changed_and_then_as_asked(every, proved):
    proof, due = SyncProof(every), []
    for number in range(9):
        weight = torch.full((2,), float(max(0, number - 2)))  # a learning rate that is zero at first
        sent = Sent([("a", weight)], verify=proof.is_due())
        due += [number] if proof.is_due() else []
        list(sent)
        proof.conclude(sent.checksums)
    assert due == proved
