"""Recorded trajectories, queues and rollouts are read back unchanged."""

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import torch

from openrlhf.data.collate import Layout
from openrlhf.rl.experience import Experience
from openrlhf.rl.record import Recorder, Replay, plain, read_queue, trajectory, write_queue
from openrlhf.rl.rollouts import Rollout
from openrlhf.rl.samples import RolloutTokens
from openrlhf.types import Prompt, Trajectory

THIRD = float(np.float32(1 / 3))
ITEM = Trajectory(
    prompt=Prompt(7, "say é", (1, 2), label={"answer": [1, 2]}, datasource="words"),
    input_ids=(1, 2, 3, 4, 5),
    action_mask=(False, False, True, False, True),
    rollout_log_probs=(0.0, 0.0, -THIRD, 0.0, -1e-9),
    reward=0.1,
    score=THIRD,
    truncated=True,
    version=3,
    extra_logs={"speed": 2.0},
    step_rewards=((2, 0.25), (4, -1.5)),
)


def experience(*items):
    """Trajectories with the same advantages each."""
    per_token = torch.tensor([[0, 0, THIRD, 0, -1]] * len(items))
    return Experience(
        trajectories=list(items),
        tokens=RolloutTokens.of(items, Layout(packing=False, pad_id=0)),
        advantages=per_token,
        rollout_log_probs=torch.zeros_like(per_token),
        old_log_probs=None,
        reference_log_probs=None,
        old_values=None,
        returns=None,
        metrics={},
        kl=None,
    )


def test_a_trajectory_is_restored():
    assert trajectory(json.loads(json.dumps(plain(ITEM)))) == ITEM


def test_the_queue_is_restored(tmp_path):
    unscored = replace(ITEM, reward=float("nan"), score=float("nan"))
    queue = [
        Rollout(4, 2, [ITEM, replace(ITEM, extra_logs={})], 5, 9, {"rollout/failures": 1.0}),
        Rollout(5, 3, [], 9, 9),
    ]
    write_queue(tmp_path / "queue.jsonl", queue)
    assert list(read_queue(tmp_path / "queue.jsonl")) == queue
    write_queue(tmp_path / "queue.jsonl", [Rollout(0, 0, [unscored], 0, 1)])
    (back,) = read_queue(tmp_path / "queue.jsonl")
    assert math.isnan(back.trajectories[0].reward)
    write_queue(tmp_path / "queue.jsonl", [])
    assert list(read_queue(tmp_path / "queue.jsonl")) == []


def test_recorded_samples_can_be_replayed(tmp_path):
    recorder = Recorder(tmp_path, decode=lambda ids: " ".join(map(str, ids)))
    recorder.write(1, experience(ITEM))
    recorder.write(2, experience(*[replace(ITEM, version=4)] * 2))
    line = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text())
    assert (line["step"], line["response"]) == (1, "3 4 5")
    assert line["advantages"] == [0, 0, 0.333333, 0, -1]

    replay = Replay(tmp_path / "rollouts")
    assert len(replay) == 2
    first, second = (asyncio.run(replay.take(number, number)) for number in (0, 1))
    assert first.trajectories == [ITEM]
    assert [item.version for item in second.trajectories] == [4, 4]
    assert (second.number, second.version, second.next_place) == (1, 4, 2)


def test_nothing_is_written_without_a_folder(tmp_path):
    Recorder(None).write(1, experience(ITEM))
    assert not list(tmp_path.iterdir())


def test_rollouts_of_an_older_run_are_deleted(tmp_path):
    def names():
        return sorted(path.name for path in (tmp_path / "rollouts").iterdir())

    recorder = Recorder(tmp_path)
    for step in (1, 2, 3, 1000000):
        recorder.write(step, experience(ITEM))
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    Recorder(tmp_path, resumed_at=2)
    assert names() == ["notes.txt", "step_000001.jsonl", "step_000002.jsonl"]
    Recorder(tmp_path)
    assert names() == ["notes.txt"]


def test_a_deleted_folder_is_created_again(tmp_path):
    Recorder(tmp_path / "gone", resumed_at=2).write(3, experience(ITEM))
    assert [path.name for path in (tmp_path / "gone" / "rollouts").iterdir()] == ["step_000003.jsonl"]
