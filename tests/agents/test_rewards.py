"""reward_func in real processes: every supported signature, and every kind of failure."""

import asyncio
import gc
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from sessions import WATCHDOG, Scripted, children, numbered, params, prompt, run, run_all

from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.errors import ConfigError, RewardError, RolloutError
from openrlhf.event_loop import mark_retrieved

LENGTHS = "[float(len(query)) for query in queries]"


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "source",
    [
        f"import torch\ndef reward_func(queries, prompts): return torch.tensor({LENGTHS})",
        f"def reward_func(queries, prompts, labels): return {LENGTHS}",
        f"import numpy\ndef reward_func(queries, prompts, labels, **kw): return {{'rewards': numpy.array({LENGTHS})}}",
        f"async def reward_func(queries, prompts, labels): return {{'rewards': {LENGTHS}}}",
    ],
)
def test_every_supported_signature_and_result(build, write, source):
    got = run(build(remote_rm_url=write(source)), [Scripted("2"), Scripted("22")])
    assert [item.reward for item in got.trajectories] == [5.0, 6.0]
    assert [item.score for item in got.trajectories] == [5.0, 6.0]
    assert got.failures == []


def test_group_is_one_call_with_prompts_and_responses(build, write, tmp_path):
    file = write(f"""
        import json, os
        calls = 0
        def reward_func(queries, prompts, labels):
            global calls
            calls += 1
            with open({str(tmp_path / "seen")!r}, "w") as seen:
                json.dump([queries, prompts, labels], seen)
            return {{"rewards": [1.0] * len(queries), "scores": [0.0] * len(queries), "extra_logs": {{"calls": calls}}}}
    """)
    asked = prompt(label={"answer": [2]})
    got = run(build(remote_rm_url=file), [Scripted("2</s>"), Scripted("3", finish="length")], asked=asked)
    expected = [["1+1=2</s>", "1+1=3"], ["1+1=", "1+1="], [{"answer": [2]}] * 2]
    assert (tmp_path / "seen").read_text() == str(expected).replace("'", '"')
    assert [item.extra_logs for item in got.trajectories] == [{"calls": 1.0}] * 2
    assert [item.score for item in got.trajectories] == [0.0, 0.0]
    assert [item.truncated for item in got.trajectories] == [False, True]
    assert got.trajectories[0].prompt is asked


def test_queries_begin_with_the_prompt_even_if_its_tokens_decode_to_another_text(build, write):
    """With é, which the tokenizer does not know, a function that cuts the prompt off would keep all of the query."""
    file = write(
        "def reward_func(queries, prompts): return [q.removeprefix(p) == '2' for q, p in zip(queries, prompts)]"
    )
    got = run(build(remote_rm_url=file), [Scripted("2"), Scripted("3")], asked=replace(prompt(), text="é+1="))
    assert [item.reward for item in got.trajectories] == [1.0, 0.0]


def test_groups_share_processes_and_keep_their_order(build, write):
    executor = build(remote_rm_url=write(f"def reward_func(queries, prompts): return {LENGTHS}"), processes=2)
    sessions = [[Scripted("x" * (n + 1))] for n in range(12)]
    got = run_all(executor, [(prompt(index=n), group) for n, group in enumerate(sessions)])
    assert [item.trajectories[0].reward for item in got] == [n + 5.0 for n in range(12)]
    assert all(session.closed == 1 for group in sessions for session in group)


@pytest.mark.slow(seconds=2)
def test_random_numbers_in_a_reward_depend_only_on_the_sample(build, write):
    file = write("""
        import random, torch
        def reward_func(queries, prompts, labels):
            return [random.random() + torch.rand(()).item() for _ in queries]
    """)
    first, second = run_all(build(remote_rm_url=file), [(prompt(), numbered(2)) for _ in range(2)])
    assert [item.reward for item in first.trajectories] == [item.reward for item in second.trajectories]


def test_reward_is_nan_if_a_model_scores_later(build):
    got = run(build(reward_pretrain="some/model"), numbered(2))
    assert torch.tensor([[item.reward, item.score] for item in got.trajectories]).isnan().all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(): ...", "has no function reward_func; it defines score"),
        ("def reward_func(x): ...", "cannot be called with"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("import os\ndef reward_func(", "SyntaxError, '(' was never closed, at {file}:2: def reward_func("),
        ("import sys; sys.exit(3)", "called sys.exit(3)"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_unusable_file_is_rejected_before_training(build, write, source, message):
    file = write(source)
    with pytest.raises(ConfigError) as error:
        build(remote_rm_url=file)
    assert message.format(file=file) in str(error.value)


WHEN_ONE = """
    import os, signal, sys, time
    def reward_func(queries, prompts, labels):
        for query in queries:
            if query.endswith("=1"):
                {fault}
        return [1.0] * len(queries)
"""
FAULTS = {
    "raise ValueError('odd')": "raised ValueError: odd at",
    "time.sleep(3600)": "did not return within 1 s (--reward_timeout)",
    "sys.exit(3)": "called sys.exit(3)",
    "os._exit(4)": "ended its process: exit code 4",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended its process: killed by SIGKILL",
    "import ctypes; ctypes.string_at(0)": "ended its process: killed by SIGSEGV",
    "return [float('nan') if q.endswith('=1') else 1.0 for q in queries]": "the reward is nan",
    "return [None if q.endswith('=1') else 1.0 for q in queries]": "the reward is None",
}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("fault", FAULTS)
def test_failure_stops_the_run_and_names_its_sample(build, write, fault):
    executor = build(remote_rm_url=write(WHEN_ONE.format(fault=fault)), reward_timeout=1.0, processes=2)
    with pytest.raises(RewardError) as error:
        run(executor, numbered(3))
    assert FAULTS[fault] in str(error.value)
    assert "prompt 7 '1+1=', response '1'" in str(error.value)
    assert "user.py" in str(error.value)


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("fault", FAULTS)
def test_skipped_failure_drops_only_its_sample(build, write, fault):
    executor = build(
        remote_rm_url=write(WHEN_ONE.format(fault=fault)), reward_timeout=1.0, processes=2, on_reward_error="skip"
    )
    sessions = numbered(3)
    got = run(executor, sessions)
    assert [item.input_ids[-1] for item in got.trajectories] == [56, 58]
    (failure,) = got.failures
    assert FAULTS[fault] in str(failure)
    assert [len(session.requests) for session in sessions] == [1, 1, 1]


@pytest.mark.parametrize(
    ("result", "message"),
    [("[1.0]", "has 1 value for 2 samples"), ("None", "got None"), ("object()", "object object")],
)
def test_malformed_result_fails_the_group(build, write, result, message):
    file = write(f"def reward_func(queries, prompts): return {result}")
    with pytest.raises(RewardError) as error:
        run(build(remote_rm_url=file), numbered(2))
    assert message in str(error.value)
    assert "response '0'" in str(error.value)
    skipped = run(build(remote_rm_url=file, on_reward_error="skip"), numbered(2))
    assert (skipped.trajectories, len(skipped.failures)) == ([], 2)


def test_crash_that_does_not_repeat_loses_no_sample(build, write, tmp_path):
    file = write(f"""
        import os
        def reward_func(queries, prompts):
            try:
                os.close(os.open({str(tmp_path / "once")!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return [1.0] * len(queries)
            os._exit(1)
    """)
    got = run(build(remote_rm_url=file), numbered(3))
    assert [item.reward for item in got.trajectories] == [1.0] * 3


def test_process_killed_from_outside_is_noticed_immediately(build, write, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = write(f"""
        import os, time
        def reward_func(queries, prompts):
            with open({str(fifo)!r}, "w") as out:
                out.write(str(os.getpid()))
            time.sleep(3600)
    """)
    executor = build(remote_rm_url=file, reward_timeout=3600.0)

    def kill_next():
        os.kill(int(fifo.read_text()), signal.SIGKILL)

    async def go():
        try:
            group = asyncio.ensure_future(executor.run_group(prompt(), params(1), [Scripted("2")]))
            for _ in range(2):  # the call, and its retry alone
                await asyncio.to_thread(kill_next)
            await asyncio.wait_for(group, WATCHDOG)
        finally:
            await executor.close()

    with pytest.raises(RewardError, match="killed by SIGKILL"):
        asyncio.run(go())


def test_close_ends_a_call_that_never_returns(build, write):
    file = write("""
        import subprocess
        def reward_func(queries, prompts):
            subprocess.run(["sleep", "3600"])
    """)
    before = children()
    executor = build(remote_rm_url=file, reward_timeout=3600.0)

    async def go():
        group = asyncio.ensure_future(executor.run_group(prompt(), params(1), [Scripted("2")]))
        await asyncio.sleep(0)
        await executor.close()
        with pytest.raises(RolloutError, match="closed"):
            await group
        await executor.close()

    started = time.monotonic()
    asyncio.run(asyncio.wait_for(go(), WATCHDOG))
    assert time.monotonic() - started < WATCHDOG
    assert children() == before


def test_closing_while_calls_are_queued_starts_no_process(build, write):
    """Replies that arrive during the close must not let the queued calls start."""
    file = write("""
        def reward_func(queries, prompts):
            return [1.0] * len(queries)
    """)
    before = children()

    async def go(delay):
        executor = build(remote_rm_url=file)
        jobs = [asyncio.ensure_future(executor.run_group(prompt(), params(1), [Scripted("2")])) for _ in range(100)]
        await asyncio.sleep(delay)
        await asyncio.wait_for(executor.close(), WATCHDOG)
        await asyncio.gather(*jobs, return_exceptions=True)

    for delay in (0.01, 0.02, 0.03, 0.05):
        asyncio.run(go(delay))
    assert children() == before


def test_cancelled_group_does_not_disturb_others(build, write):
    file = write("""
        import time
        def reward_func(queries, prompts):
            if "9" in prompts[0]:
                time.sleep(3600)
            return [1.0] * len(queries)
    """)
    executor = build(remote_rm_url=file, reward_timeout=3600.0)

    async def go():
        try:
            stuck = asyncio.ensure_future(executor.run_group(prompt("9+9="), params(1), [Scripted("2")]))
            waiting = asyncio.ensure_future(executor.run_group(prompt(), params(1), [Scripted("2")]))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stuck, 0.2)
            return await asyncio.wait_for(waiting, WATCHDOG)
        finally:
            await executor.close()

    assert asyncio.run(go()).trajectories[0].reward == 1.0


def test_engine_error_is_raised_unchanged(build, write):
    class Broken(Scripted):
        async def generate(self, request, *, last=False):
            raise RolloutError("the engine is gone")

    executor = build(remote_rm_url=write("def reward_func(q, p): return [1.0]"), on_reward_error="skip")
    with pytest.raises(RolloutError, match="the engine is gone"):
        run(executor, [Broken()])


@pytest.mark.parametrize("listening", [mark_retrieved, lambda answer: answer], ids=["marked", "left alone"])
def test_mark_retrieved_silences_errors_that_are_never_awaited(listening, caplog):
    async def leave():
        listening(asyncio.get_running_loop().create_future()).set_exception(CallFailure("odd"))
        await asyncio.sleep(0)

    asyncio.run(leave())
    gc.collect()
    assert ("CallFailure: odd" in caplog.text) == (listening is not mark_retrieved)
