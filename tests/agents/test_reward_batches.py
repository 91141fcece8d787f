"""Several groups in one call of a reward function: which groups share a call, and how results are split again."""

import asyncio
import json

import pytest
from sessions import WATCHDOG, Scripted, numbered, params, prompt, run, run_all

from openrlhf.errors import RewardError

# Each call appends its prompts to a file.
RECORD = """
    import json, os
    def record(prompts):
        with open({seen!r}, "a") as out:
            out.write(json.dumps(prompts) + "\\n")
"""
LENGTHS = """
    def reward_func(queries, prompts, labels):
        record(prompts)
        lengths = [float(len(query)) for query in queries]
        return {"rewards": lengths, "scores": [0.5] * len(queries), "extra_logs": {"length": lengths, "one": 1}}
"""


@pytest.fixture
def seen(tmp_path):
    return tmp_path / "seen"


def calls(seen):
    return [sorted(set(json.loads(line))) for line in seen.read_text().splitlines()]


def groups(numbers, samples=2):
    return [(prompt(f"{number}=", index=number), numbered(samples)) for number in numbers]


def test_groups_that_are_ready_together_share_calls_in_prompt_order(build, write, seen):
    file = write(RECORD.format(seen=str(seen)) + LENGTHS)
    executor = build(remote_rm_url=file, reward_batch_groups=2, in_lockstep=True)
    run_all(executor, groups([4, 3, 2, 1, 0]))
    assert calls(seen) == [["0=", "1="], ["2=", "3="], ["4="]]


def test_results_are_split_by_group(build, write, seen):
    file = write(RECORD.format(seen=str(seen)) + LENGTHS)
    texts = [["2", "22"], ["333"], ["4", "44", "444"]]
    asked = [(prompt(f"{number}=", index=number), [Scripted(text) for text in own]) for number, own in enumerate(texts)]
    got = run_all(build(remote_rm_url=file, reward_batch_groups=3), asked)
    assert calls(seen) == [["0=", "1=", "2="]]
    assert [[item.reward for item in result.trajectories] for result in got] == [[3.0, 4.0], [5.0], [3.0, 4.0, 5.0]]
    assert [[item.extra_logs for item in result.trajectories] for result in got][1] == [{"length": 5.0, "one": 1.0}]
    assert {item.score for result in got for item in result.trajectories} == {0.5}
    assert [[item.prompt.index for item in result.trajectories] for result in got] == [[0, 0], [1], [2, 2, 2]]


def test_a_lone_group_is_scored_immediately(build, write, seen):
    file = write(RECORD.format(seen=str(seen)) + LENGTHS)
    got = run(build(remote_rm_url=file, reward_batch_groups=8), numbered(1))
    assert [item.reward for item in got.trajectories] == [5.0]


async def wait_for(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_groups_that_become_ready_during_a_call_share_the_next(build, write, seen, tmp_path):
    """The first call returns only after the other groups have become ready."""
    go = tmp_path / "go"
    file = write(
        RECORD.format(seen=str(seen))
        + f"""
    import time
    def reward_func(queries, prompts, labels):
        record(prompts)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        return [1.0] * len(queries)
"""
    )
    executor = build(remote_rm_url=file, reward_batch_groups=3, reward_timeout=200.0)

    async def play():
        try:
            asked = groups(range(5))
            jobs = [asyncio.ensure_future(executor.run_group(asked[0][0], params(2), asked[0][1]))]
            await wait_for(seen.exists)
            jobs += [asyncio.ensure_future(executor.run_group(item, params(2), own)) for item, own in asked[1:]]
            await wait_for(lambda: len(executor.rewards.batches.ready) == 4)
            go.touch()
            return await asyncio.wait_for(asyncio.gather(*jobs), WATCHDOG)
        finally:
            await executor.close()

    got = asyncio.run(play())
    assert calls(seen) == [["0="], ["1=", "2=", "3="], ["4="]]
    assert [len(result.trajectories) for result in got] == [2] * 5


WHEN_ONE = """
    def reward_func(queries, prompts, labels):
        record(prompts)
        for query in queries:
            if query == "1=1":
                {fault}
        return [1.0] * len(queries)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('odd')", "raised ValueError: odd"),
        ("os._exit(4)", "exit code 4"),
        ("return [float('nan') if query == '1=1' else 1.0 for query in queries]", "the reward is nan"),
    ],
)
def test_a_failure_drops_only_its_sample(build, write, seen, fault, message):
    file = write(RECORD.format(seen=str(seen)) + WHEN_ONE.format(fault=fault))
    executor = build(remote_rm_url=file, reward_batch_groups=3, on_reward_error="skip")
    got = run_all(executor, groups(range(3), samples=3))
    assert [len(result.trajectories) for result in got] == [3, 2, 3]
    (failure,) = got[1].failures
    assert message in str(failure)
    assert "prompt 1 '1=', response '1'" in str(failure)
    assert calls(seen)[0] == ["0=", "1=", "2="]


def test_a_malformed_result_fails_only_the_group_that_causes_it(build, write, seen):
    source = RECORD.format(seen=str(seen)) + WHEN_ONE.format(fault="return [1.0]")
    executor = build(remote_rm_url=write(source), reward_batch_groups=3, on_reward_error="skip")
    got = run_all(executor, groups(range(3)))
    assert [len(result.trajectories) for result in got] == [2, 0, 2]
    assert "has 1 value for 2 samples" in str(got[1].failures[0])
    assert calls(seen) == [["0=", "1=", "2="], ["0="], ["1="], ["2="]]


def test_a_failure_stops_the_run_and_names_its_sample(build, write, seen):
    source = RECORD.format(seen=str(seen)) + WHEN_ONE.format(fault="raise ValueError('odd')")
    with pytest.raises(RewardError, match=r"raised ValueError: odd .* for prompt 1 '1=', response '1'"):
        run_all(build(remote_rm_url=write(source), reward_batch_groups=3), groups(range(3)))


def test_a_cancelled_group_leaves_the_others_of_its_call_alone(build, write, seen, tmp_path):
    go = tmp_path / "go"
    file = write(
        RECORD.format(seen=str(seen))
        + f"""
    import asyncio
    async def reward_func(queries, prompts, labels):
        record(prompts)
        while not os.path.exists({str(go)!r}):
            await asyncio.sleep(0.01)
        return [1.0] * len(queries)
"""
    )
    executor = build(remote_rm_url=file, reward_batch_groups=2, reward_timeout=200.0)

    async def play():
        try:
            jobs = [asyncio.ensure_future(executor.run_group(item, params(2), own)) for item, own in groups(range(2))]
            await wait_for(seen.exists)
            jobs[0].cancel()
            await asyncio.wait(jobs[:1])
            go.touch()
            kept = await asyncio.wait_for(jobs[1], WATCHDOG)
            assert executor.rewards.batches.running == set()
            return kept
        finally:
            await executor.close()

    assert len(asyncio.run(play()).trajectories) == 2
    assert calls(seen) == [["0=", "1="]]
