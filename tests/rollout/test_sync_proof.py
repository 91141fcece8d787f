"""Checksums of weights are compared on both sides of a sync."""

import pytest
import torch

from openrlhf.errors import RolloutError
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.sync_proof import RecordedWeights, SyncProof, compare


def sums(**tensors):
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def test_weights_that_arrive_unchanged_raise_no_error():
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    sent = RecordedWeights(tensors.items(), verify=True)
    assert dict(sent) == tensors
    compare(sent.checksums, sums(**tensors), "engine 0")


def test_missing_changed_and_unknown_tensors_are_named():
    one, other = torch.zeros(2), torch.ones(2)
    with pytest.raises(RolloutError, match=r"engine 0.*1 missing \(b\).*1 with other values \(a\).*1 never sent \(c\)"):
        compare(sums(a=one, b=one), sums(a=other, c=one), "engine 0")


@pytest.mark.parametrize(("every", "proved"), [(0, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 6])])
def test_syncs_are_checked_until_the_weights_change_and_then_at_the_given_interval(every, proved):
    proof, due = SyncProof(every), []
    for number in range(9):
        weight = torch.full((2,), float(max(0, number - 2)))  # the learning rate is zero at first
        sent = RecordedWeights([("a", weight)], verify=proof.is_due())
        due += [number] if proof.is_due() else []
        list(sent)
        proof.conclude(sent.checksums)
    assert due == proved
