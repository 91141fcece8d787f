"""Micro-batches of a sharded reward model: every process must run the same number of forwards."""

from types import SimpleNamespace

import numpy as np

from openrlhf.data.collate import Layout
from openrlhf.rl.reward_models import rounds
from openrlhf.rl.samples import Batching

ROWS = [np.arange(length, dtype=np.int32) for length in (5, 3, 4)]
BY_TOKENS = Batching(Layout(packing=True, pad_id=0), size=1, token_budget=8)


class ShardedModel:
    """A model that another process must run `other_rounds` times; it records the order of events."""

    def __init__(self, other_rounds):
        self.other_rounds = other_rounds
        self.events = []

    network = SimpleNamespace(sharing_limit=0)

    def most_rounds(self, count):
        self.events.append("agreed")
        return max(count, self.other_rounds)


def run_rounds(model):
    found = []
    for places, part in rounds(BY_TOKENS, ROWS, model):
        model.events.append("ran")
        found.append((places, [len(row) for row in part]))
    return found


def test_every_row_is_in_one_micro_batch_within_the_budget():
    found = run_rounds(ShardedModel(0))
    assert sorted(place for places, _ in found for place in places) == [0, 1, 2]
    assert all(sum(lengths) <= 8 for _, lengths in found)


def test_a_process_with_fewer_micro_batches_repeats_one_and_discards_the_result():
    own, found = run_rounds(ShardedModel(0)), run_rounds(ShardedModel(4))
    assert found[: len(own)] == own
    assert found[len(own) :] == [([], own[0][1])] * (4 - len(own))


def test_processes_agree_before_the_first_forward():
    model = ShardedModel(4)  # agreeing in between would wait for processes that are in a forward
    run_rounds(model)
    assert model.events == ["agreed", *["ran"] * 4]
