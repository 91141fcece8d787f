"""Times of a rollout: how long samples and rewards take, and how much of the time the engines have work."""

import asyncio
import time

import pytest

from openrlhf.rl.rollout_times import RolloutTimes, describe
from openrlhf.rollout.engine_group import EngineGroup, EngineReplica
from openrlhf.rollout.usage import UsageClock
from tests.metric_tables import find_metric
from tests.rl.stand_ins import EchoEngine


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""

    class Clock:
        now = 100.0

        def advance(self, seconds):
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_overlapping_activities_count_once(clock):
    usage = UsageClock()
    usage.begin()
    clock.advance(2)
    usage.begin()
    clock.advance(3)
    usage.end()
    clock.advance(1)
    assert usage.seconds == 6
    usage.end()
    clock.advance(10)
    assert usage.seconds == 6
    usage.begin()
    clock.advance(4)
    assert usage.seconds == 10


def test_a_lap_has_the_times_since_the_last_one(clock):
    times = RolloutTimes(EchoEngine())
    times.generating.begin()
    times.requesting.begin()
    clock.advance(3)
    times.requesting.end()
    clock.advance(1)
    times.samples += [1.0, 2.0, 3.0, 4.0]
    times.rewards += [0.5, 1.5]
    assert times.lap() == {
        "timing/engines_busy": 0.75,
        "timing/sample_p50": 2.5,
        "timing/sample_p95": pytest.approx(3.85),
        "timing/sample_max": 4.0,
        "timing/reward_mean": 1.0,
        "timing/reward_max": 1.5,
    }
    clock.advance(2)
    assert times.lap() == {"timing/engines_busy": 0.0}
    assert times.lap() == {}


def test_the_work_of_several_engines_is_averaged(clock):
    async def main():
        engines = EngineGroup([EngineReplica(0, None), EngineReplica(1, None)], None, 0)
        times = RolloutTimes(engines)
        times.generating.begin()
        engines.engines[1].busy.begin()
        clock.advance(4)
        engines.engines[0].busy.begin()
        clock.advance(4)
        return times.lap()

    assert asyncio.run(main()) == {"timing/engines_busy": 0.75}


VALUES = {
    "timing/engines_busy": 0.756,
    "timing/sample_p50": 2.5,
    "timing/sample_p95": 30.0,
    "timing/sample_max": 41.27,
    "timing/reward_mean": 0.5,
    "timing/reward_max": 1.5,
    "timing/trainer_wait": 12.0,
    "timing/queue_wait": 0.25,
    "dynamic_filtering_pass_rate": 60.0,
    "staleness": 2.0,
    "staleness_mean": 1.25,
}


def test_a_line_says_where_the_time_went():
    assert describe(3, VALUES) == (
        "step 3: engines 76% busy, samples 2.5 s (p95 30, max 41.3), rewards 0.5 s (max 1.5), 40% filtered out, "
        "1.2 updates old (max 2), trainer waited 12 s, 0.25 s in the queue"
    )
    assert describe(3, {"timing/trainer_wait": 1.0}) is None  # a replay


def test_every_name_is_explained():
    assert all(find_metric("train", name, "train_ppo") for name in VALUES)
