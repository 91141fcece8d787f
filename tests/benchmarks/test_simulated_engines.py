"""The simulation of engines: times worked out by hand, and policies compared on a few engines."""

from argparse import Namespace
from itertools import pairwise

import pytest
import simulated_engines
from simulated_engines import Cluster, Groups, run_barrier, run_stream

SETTINGS = Namespace(
    token_seconds=1.0,
    sequence_seconds=0.5,
    slots=2,
    train_seconds=30.0,
    sync_seconds=5.0,
    in_flight=3.0,
    oversampling=1.5,
)


def test_sequences_share_an_engine_and_wait_for_a_slot():
    """A step takes 1.5 s with one sequence and 2 s with two."""
    cluster = Cluster(1, SETTINGS)
    for tokens, group in ((4, 0), (6, 1), (3, 2)):
        cluster.start(tokens, group)
    assert (cluster.next_finished(), cluster.time) == (0, 8.0)  # 4 steps of two; the third sample takes the slot
    assert (cluster.next_finished(), cluster.time) == (1, 12.0)  # 2 steps of two
    cluster.paused += 100.0
    assert cluster.next_finished(until=113.0) is None
    assert cluster.time == 113.0
    assert (cluster.next_finished(), cluster.time) == (2, 113.5)  # 1 step alone
    assert cluster.next_finished(until=200.0) is None
    assert cluster.tokens == 13


def test_the_least_busy_engine_gets_the_next_sample():
    cluster = Cluster(2, SETTINGS)
    for group in range(4):
        cluster.start(10, group)
    assert [len(engine.running) for engine in cluster.engines] == [2, 2]
    assert sorted(cluster.next_finished() for _ in range(4)) == [0, 1, 2, 3]
    assert cluster.time == 20.0


@pytest.mark.parametrize("pass_rate", [1.0, 0.4])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_takes_no_longer_than_a_barrier(asynchronous, pass_rate, monkeypatch):
    monkeypatch.setattr(simulated_engines, "BATCH", 8)

    def last_step(run):
        cluster = Cluster(4, SETTINGS)
        steps = run(cluster, Groups(cluster, pass_rate), asynchronous=asynchronous)
        times = [next(steps) for _ in range(6)]
        assert times == sorted(times)
        assert min(after - before for before, after in pairwise(times)) >= SETTINGS.sync_seconds
        return times[-1]

    assert last_step(run_stream) < last_step(run_barrier)
