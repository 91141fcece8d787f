"""Concurrent calls of a reward function: async on the worker's event loop, plain in the worker's threads."""

import asyncio
import resource
import threading

import pytest
from sessions import WATCHDOG, Scripted, numbered, params, prompt, run_all

from openrlhf.agents.sandbox.worker import OPEN_FILES
from openrlhf.config.in_memory import held

# Each call waits until as many calls as `together` have started, in any process; with fewer, none would return.
MEET = """
    import asyncio, os, threading, time
    here = {folder!r}
    def arrive(prompts):
        open(os.path.join(here, prompts[0]), "w").close()
    def is_complete():
        return len(os.listdir(here)) >= {together}
"""
ASYNC_MEET = (
    MEET
    + """
    async def reward_func(queries, prompts, labels):
        arrive(prompts)
        while not is_complete():
            await asyncio.sleep(0.01)
        return [float(os.getpid())] * len(queries)
"""
)
PLAIN_MEET = (
    MEET
    + """
    def reward_func(queries, prompts, labels):
        arrive(prompts)
        while not is_complete():
            time.sleep(0.01)
        return [float(os.getpid())] * len(queries)
"""
)


def groups(count):
    return [(prompt(f"{number}=", index=number), numbered(2)) for number in range(count)]


def rewards(results):
    return [[item.reward for item in result.trajectories] for result in results]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("source", "flags"),
    [
        (ASYNC_MEET, {}),  # 24 of 64 calls
        (ASYNC_MEET, {"processes": 2, "reward_concurrency": 12}),
        (PLAIN_MEET, {"processes": 2, "reward_concurrency": 12}),
        (PLAIN_MEET, {"processes": 1, "reward_concurrency": 24}),
    ],
    ids=["async by default", "async in two processes", "threads in two processes", "threads in one process"],
)
def test_calls_overlap_up_to_the_limit_of_every_process(build, write, tmp_path, source, flags):
    (tmp_path / "started").mkdir()
    file = write(source.format(folder=str(tmp_path / "started"), together=24))
    got = rewards(run_all(build(remote_rm_url=file, reward_timeout=200.0, **flags), groups(24)))
    assert [len(group) for group in got] == [2] * 24
    assert len({pid for group in got for pid in group}) == flags.get("processes", 1)


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (1, 1)])
def test_no_more_calls_overlap_than_the_limit(build, write, limit, most):
    file = write(f"""
        import asyncio
        running, started = 0, 0
        async def reward_func(queries, prompts, labels):
            global running, started
            running, started = running + 1, started + 1
            seen = running
            while running < {limit} and started < 7:
                await asyncio.sleep(0)
                seen = max(seen, running)
            await asyncio.sleep(0)
            seen = max(seen, running)
            running -= 1
            return [float(seen)] * len(queries)
    """)
    got = rewards(run_all(build(remote_rm_url=file, reward_concurrency=limit), groups(7)))
    assert max(seen for group in got for seen in group) == most


WHEN_ONE = """
    import asyncio, os, re, time
    {define} reward_func(queries, prompts, labels):
        for query in queries:
            if query == "3=1":
                {fault}
        return [1.0] * len(queries)
"""
FAULTS = [
    ("async def", "raise ValueError('odd')", "raised ValueError: odd at"),
    ("async def", "await asyncio.Event().wait()", "did not return within 1 s (--reward_timeout)"),
    ("async def", "time.sleep(3600)", "did not return within 1 s (--reward_timeout)"),
    ("async def", "os._exit(4)", "ended its process: exit code 4"),
    ("def", "raise ValueError('odd')", "raised ValueError: odd at"),
    ("def", "next(iter(()))", "StopIteration"),
    ("def", "raise SystemExit(3)", "called sys.exit(3)"),
    ("def", "time.sleep(3600)", "did not return within 1 s (--reward_timeout)"),
    ("def", "os._exit(4)", "ended its process: exit code 4"),
    # Backtracking holds the interpreter, so no thread of the process can run.
    ("def", "re.match('(a+)+b', 'a' * 99)", "did not return within 1 s (--reward_timeout)"),
]


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(("define", "fault", "message"), FAULTS, ids=[f"{kind} {fault}" for kind, fault, _ in FAULTS])
def test_a_failure_among_concurrent_calls_drops_only_its_sample(build, write, define, fault, message):
    file = write(WHEN_ONE.format(define=define, fault=fault))
    executor = build(remote_rm_url=file, reward_timeout=1.0, reward_concurrency=4, on_reward_error="skip")
    got = run_all(executor, groups(6))
    assert rewards(got) == [[1.0, 1.0]] * 3 + [[1.0]] + [[1.0, 1.0]] * 2
    (failure,) = got[3].failures
    assert message in str(failure)
    assert "prompt 3 '3=', response '1'" in str(failure)


class Late(Scripted):
    """Session that answers after a second."""

    async def generate(self, request, *, last=False):
        await asyncio.sleep(1.0)
        return await super().generate(request, last=last)


@pytest.mark.slow(seconds=5)
def test_a_hanging_call_is_cancelled_and_the_others_of_its_process_continue(build, write, tmp_path):
    """The second call starts a second later, waits until the first one is cancelled, and returns: it ran once."""
    seen = tmp_path / "seen"
    file = write(f"""
        import asyncio, os
        cancelled = False
        async def reward_func(queries, prompts, labels):
            global cancelled
            with open({str(seen)!r}, "a") as out:
                out.write(f"{{prompts[0]}} ")
            if prompts[0] == "0=":
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled = True
            while not cancelled:
                await asyncio.sleep(0.01)
            return [1.0] * len(queries)
    """)
    executor = build(remote_rm_url=file, reward_timeout=2.0, on_reward_error="skip")
    hanging, other = run_all(executor, [(prompt("0=", index=0), numbered(1)), (prompt("1=", index=1), [Late("2")])])
    assert "did not return within 2 s" in str(hanging.failures[0])
    assert [item.reward for item in other.trajectories] == [1.0]
    assert seen.read_text().split() == ["0=", "1=", "0="]  # the last one is the sample alone


def test_a_plain_function_of_a_python_caller_may_run_in_threads(build):
    meeting = threading.Barrier(3)

    def score(queries, prompts, labels):
        meeting.wait()
        return [1.0] * len(queries)

    with held("score", score) as name:
        executor = build(remote_rm_url=name, reward_concurrency=3)
    assert rewards(run_all(executor, groups(3))) == [[1.0, 1.0]] * 3


@pytest.mark.slow(seconds=4)
def test_calls_do_not_overtake_the_code_that_they_need(build, write, monkeypatch, capfd):
    """A call that reached the worker before its file used to fail, and was retried only after --reward_timeout."""
    connect = asyncio.open_unix_connection

    async def connect_slowly(*given, **named):
        connected = await connect(*given, **named)
        await asyncio.sleep(0.3)
        return connected

    file = write(
        """
        import asyncio

        async def reward_func(queries, prompts, labels):
            await asyncio.sleep(2)  # longer than all calls take to arrive, so that both processes get some
            return [1.0] * len(queries)
        """
    )
    executor = build(processes=2, remote_rm_url=file, reward_timeout=8.0)
    monkeypatch.setattr(asyncio, "open_unix_connection", connect_slowly)

    async def go():
        try:
            jobs = []
            for index in range(100):
                jobs.append(asyncio.ensure_future(executor.run_group(prompt(index=index), params(1), [Scripted("a")])))
                await asyncio.sleep(0.01)
            return await asyncio.wait_for(asyncio.gather(*jobs), WATCHDOG)
        finally:
            await executor.close()

    assert [group.trajectories[0].reward for group in asyncio.run(go())] == [1.0] * 100
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow(seconds=2)
def test_a_worker_may_have_as_many_connections_as_the_system_allows(build, write):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    file = write(
        """
        import resource

        def reward_func(queries, prompts, labels):
            return [float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])] * len(queries)
        """
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        (group,) = run_all(build(remote_rm_url=file), [(prompt(), [Scripted("a")])])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    most = OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(OPEN_FILES, limits[1])
    assert group.trajectories[0].reward == most
