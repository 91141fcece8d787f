"""Recorded trajectories, queues and rollouts are read back unchanged."""

import asyncio
import json
import math
import re
import shutil
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.data.collate import Layout
from openrlhf.errors import DataError
from openrlhf.rl import sample_files
from openrlhf.rl.experience import Experience
from openrlhf.rl.record import Recorder, Replay, read_queue, write_queue
from openrlhf.rl.rollouts import Rollout
from openrlhf.rl.sample_files import read_about, read_samples, write_samples
from openrlhf.rl.samples import RolloutTokens
from openrlhf.training.disk_space import GIB
from openrlhf.types import Prompt
from tests.samples import make_trajectory, plain

WATCHDOG = 300.0  # seconds
THIRD = float(np.float32(1 / 3))
ITEM = make_trajectory(
    Prompt(7, "say é", (1, 2), label={"answer": [1, 2]}, datasource="words"),
    ids=(1, 2, 3, 4, 5),
    mask=(False, False, True, False, True),
    log_probs=(0.0, 0.0, -THIRD, 0.0, -1e-9),
    reward=0.1,
    score=THIRD,
    truncated=True,
    version=3,
    extra_logs={"speed": 2.0},
    step_rewards=((2, 0.25), (4, -1.5)),
)


def experience(*items):
    """Trajectories with the same advantages each."""
    per_token = torch.tensor([0, 0, THIRD, 0, -1] * len(items))
    return Experience(
        trajectories=list(items),
        tokens=RolloutTokens(items, Layout(packing=False, pad_id=0)),
        advantages=per_token,
        old_log_probs=None,
        reference_log_probs=None,
        old_values=None,
        returns=None,
        metrics={},
        kl=None,
    )


def old_line(item):
    """Return a sample as versions before 1.1 recorded it."""
    values = plain(item)
    del values["token_versions"]
    return json.dumps(values | {"temperature_factors": [], "step": 1, "response": "", "advantages": [0.0] * 5}) + "\n"


def test_samples_are_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "GROUP_TOKENS", 12)  # two samples per row group
    factors = np.array([1.0, 1.0, 2.0, 1.0, 0.5], np.float32)
    odd = replace(ITEM.prompt, text="a lone \udc00 surrogate", label="text")
    bare = replace(ITEM, step_rewards=(), extra_logs={})
    routed = replace(ITEM, routed_experts=np.arange(30, dtype=np.int16).reshape(5, 3, 2))
    items = [ITEM, replace(ITEM, temperature_factors=factors), bare, routed, ITEM]
    write_samples(tmp_path / "samples.parquet", items, {"step": pa.array([1] * 5)}, about={"more": [1]})
    assert plain(read_samples(tmp_path / "samples.parquet")) == plain(items)
    assert read_about(tmp_path / "samples.parquet") == {"more": [1]}
    assert pq.ParquetFile(tmp_path / "samples.parquet").num_row_groups == 3
    write_samples(tmp_path / "samples.parquet", [replace(ITEM, prompt=odd)], {})
    (back,) = read_samples(tmp_path / "samples.parquet")
    assert (back.prompt.text, back.prompt.label) == ("a lone \ufffd surrogate", "text")


def test_records_of_older_versions_can_be_replayed(tmp_path):
    (tmp_path / "step_000001.jsonl").write_text(old_line(ITEM) + old_line(replace(ITEM, version=5)))
    write_samples(tmp_path / "step_000002.parquet", [ITEM], {})
    replay = Replay(tmp_path, 1000)
    first, second = (asyncio.run(replay.take(number, number)) for number in (0, 1))
    assert plain(second.trajectories) == plain([ITEM])
    assert plain(first.trajectories[0]) == plain(ITEM)
    assert first.trajectories[1].token_versions.tolist() == [-1, -1, 5, -1, 5]


def test_the_queue_of_an_older_version_is_restored(tmp_path):
    queue = [Rollout(4, 2, [ITEM], 5, 9, {"rollout/failures": 1.0})]
    row = plain(queue[0]) | {"trajectories": [json.loads(old_line(ITEM))]}
    (tmp_path / "queue.jsonl").write_text(json.dumps(row) + "\n")
    assert plain(list(read_queue(tmp_path / "queue.parquet"))) == plain(queue)


def test_the_queue_is_restored(tmp_path):
    unscored = replace(ITEM, reward=float("nan"), score=float("nan"))
    queue = [
        Rollout(4, 2, [ITEM, replace(ITEM, extra_logs={})], 5, 9, {"rollout/failures": 1.0}),
        Rollout(5, 3, [], 9, 9),
    ]
    write_queue(tmp_path / "queue.parquet", queue)
    assert plain(list(read_queue(tmp_path / "queue.parquet"))) == plain(queue)
    write_queue(tmp_path / "queue.parquet", [Rollout(0, 0, [unscored], 0, 1)])
    (back,) = read_queue(tmp_path / "queue.parquet")
    assert math.isnan(back.trajectories[0].reward)
    write_queue(tmp_path / "queue.parquet", [])
    assert list(read_queue(tmp_path / "queue.parquet")) == []


def test_recorded_samples_can_be_replayed(tmp_path):
    recorder = Recorder(tmp_path, decode=lambda ids: " ".join(map(str, ids)))
    recorder.write(1, experience(ITEM))
    recorder.write(2, experience(*[replace(ITEM, version=4)] * 2))
    (row,) = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert (row["step"], row["response"]) == (1, "3 4 5")
    assert row["advantages"] == [0, 0, THIRD, 0, -1]

    replay = Replay(tmp_path / "rollouts", 1000)
    assert len(replay) == 2
    first, second = (asyncio.run(replay.take(number, number)) for number in (0, 1))
    assert plain(first.trajectories) == plain([ITEM])
    assert [item.version for item in second.trajectories] == [4, 4]
    assert (second.number, second.version, second.next_place) == (1, 4, 2)


def test_the_next_step_and_a_checkpoint_wait_for_the_file(tmp_path):
    """The first file is written only when the test allows it."""
    may_write, written = threading.Event(), []

    class Slow(Recorder):
        def write(self, step, experience):
            may_write.wait(WATCHDOG)
            super().write(step, experience)
            written.append(step)

    async def steps():
        recorder = Slow(tmp_path)
        await recorder.record(1, experience(ITEM))  # does not wait
        assert not written
        may_write.set()
        await recorder.record(2, experience(ITEM))
        assert written[:1] == [1]
        await recorder.flush()
        assert written == [1, 2]

    asyncio.run(steps())
    assert names(tmp_path / "rollouts") == [".about.json", "step_000001.parquet", "step_000002.parquet"]


def test_nothing_is_written_without_a_folder(tmp_path):
    Recorder(None).write(1, experience(ITEM))
    assert not list(tmp_path.iterdir())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_deleted_folder_is_created_again(tmp_path):
    recorder = Recorder(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    recorder.write(3, experience(ITEM))
    assert names(tmp_path / "gone" / "rollouts") == ["step_000003.parquet"]


def test_a_share_of_the_groups_is_recorded_as_whole_groups(tmp_path):
    samples = [replace(ITEM, prompt=replace(ITEM.prompt, index=place // 4)) for place in range(400)]

    def recorded(name, **flags):
        Recorder(tmp_path / name, flags=RolloutFlags(**flags)).write(1, experience(*samples))
        return Counter(item.prompt.index for item in read_samples(tmp_path / name / "rollouts" / "step_000001.parquet"))

    some = recorded("some", rollout_record_share=0.25)
    assert set(some.values()) == {4}
    assert 10 < len(some) < 45  # binomial with mean 25; the choice is a fixed function of the seed
    assert recorded("same", rollout_record_share=0.25) == some
    assert len(recorded("all")) == 100
    Recorder(tmp_path / "few", flags=RolloutFlags(rollout_record_share=1e-9)).write(1, experience(*samples))
    assert names(tmp_path / "few" / "rollouts") == [".about.json"]
    Recorder(tmp_path / "none", flags=RolloutFlags(rollout_record_share=0.0)).write(1, experience(*samples))
    assert not (tmp_path / "none").exists()


def test_recording_stops_at_its_limit_with_one_line(tmp_path, capsys):
    recorder = Recorder(tmp_path)
    recorder.write(1, experience(ITEM))
    size = (tmp_path / "rollouts" / "step_000001.parquet").stat().st_size
    resumed = Recorder(tmp_path, flags=RolloutFlags(rollout_record_gib=2.5 * size / GIB))  # counts what is there
    for step in (2, 3, 4):
        resumed.write(step, experience(ITEM))
    assert names(tmp_path / "rollouts") == [".about.json", "step_000001.parquet", "step_000002.parquet"]
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "rollouts are no longer recorded: " in line
    assert "has reached --rollout_record_gib" in line


def test_a_full_disk_stops_recording_and_leaves_no_partial_file(tmp_path, file_size_limit, capsys):
    recorder = Recorder(tmp_path)
    recorder.write(1, experience(ITEM))
    with file_size_limit(100):
        for step in (2, 3):
            recorder.write(step, experience(ITEM))
    recorder.write(4, experience(ITEM))
    assert names(tmp_path / "rollouts") == [".about.json", "step_000001.parquet"]
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "cannot be written: File too large. Training continues" in line


def test_a_folder_that_cannot_be_created_stops_recording_only(tmp_path, capsys):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    Recorder(tmp_path).write(1, experience(ITEM))
    assert "rollouts are no longer recorded" in capsys.readouterr().err


def test_a_replay_says_what_a_partial_record_lacks(tmp_path, capsys):
    groups = experience(*[replace(ITEM, prompt=replace(ITEM.prompt, index=place)) for place in range(20)])
    recorder = Recorder(tmp_path, flags=RolloutFlags(rollout_record_share=0.5))
    for step in (1, 2, 5, 6):
        recorder.write(step, groups)
    recorder.limit = 0
    recorder.write(7, groups)
    capsys.readouterr()
    assert len(Replay(tmp_path / "rollouts", 1000)) == 4
    folder = tmp_path / "rollouts"
    told = "50% of the groups, 2 steps missing, recording stopped before step 7"
    assert capsys.readouterr().err == f"openrlhf: --replay {folder} is a partial record: {told}\n"


def with_column(name, values):
    """Return a function that changes a column of a recorded file."""

    def change(file):
        table = pq.read_table(file)
        place, column = table.schema.get_field_index(name), table.column(name)
        kind = pa.list_(column.type.value_type) if pa.types.is_list(column.type) else column.type  # may contain nulls
        pq.write_table(table.set_column(place, name, pa.array([values] * len(table), kind)), file)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "cannot be read"),
        (lambda file: pq.write_table(pq.read_table(file).drop_columns("action_mask"), file), "cannot be read"),
        (with_column("extra_logs", "[" * 100_000), "cannot be read"),
        (with_column("action_mask", [True]), "is damaged"),
        (with_column("action_mask", None), "cannot be read: a value of action_mask is null"),
        (with_column("reward", None), "a value of reward is null"),
        (with_column("input_ids", [1, 2, None, 4, 5]), "a value of input_ids is null"),
        (with_column("rollout_log_probs", [0.0, 0.0, None, 0.0, 0.0]), "a value of rollout_log_probs is null"),
        (with_column("temperature_factors", [1.0, 1.0, 1.0, 1.0, None]), "a value of temperature_factors is null"),
        (with_column("step_rewards", [{"place": 2, "reward": None}]), "a value of step_rewards.reward is null"),
        (with_column("temperature_factors", [1.0]), "is damaged"),
        (with_column("input_ids", [1, 2, 3, 4, 10]), "has the token 10: the policy has 10"),
        (with_column("input_ids", [1, -2, 3, 4, 5]), "has the token -2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_that_cannot_be_replayed_gives_one_error(change, complaint, tmp_path):
    """Without a check, a token of another model ends a run on a GPU with an assertion of CUDA."""
    Recorder(tmp_path, decode=str).write(1, experience(ITEM))
    file = tmp_path / "rollouts" / "step_000001.parquet"
    change(file)
    with pytest.raises(DataError, match=re.escape(str(file)) + ".* " + complaint):
        asyncio.run(Replay(tmp_path / "rollouts", 10).take(0, 0))
