"""Engine processes of a trainer: calls, errors, deaths and clean-up, with a stand-in for the engine."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial

import psutil
import pytest

from openrlhf.errors import BackendError, DeathError, EngineError, RolloutError
from openrlhf.rollout import engine_process
from openrlhf.rollout.engine_process import LocalProcess, open_engine_processes
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.types import Request, SamplingParams
from tests.commands import command_environ
from tests.rollout.engine_stand_ins import ECHO, EXITS, FAILS, KILLED, REJECTS, UNSENDABLE, WAITS, StandInEngine

WATCHDOG = 120.0  # seconds


def request(*ids, prefix=0):
    return Request(ids, SamplingParams(max_tokens=1), prefix=prefix)


def open_stand_ins(count=1, max_restarts=0, in_turn=False):
    return open_engine_processes(
        count,
        lambda number: partial(StandInEngine, number),
        environment={},
        timeout=WATCHDOG,
        max_restarts=max_restarts,
        in_turn=in_turn,
        awaits_weights=False,
    )


def with_engines(scenario, **settings):
    """Run `scenario(group)` while engine processes run; none of them may be left afterwards."""
    processes = []

    def note(group):
        processes.extend(psutil.Process(engine.process.child.process.pid) for engine in group.engines)

    async def run():
        async with open_stand_ins(**settings) as group:
            note(group)
            await scenario(group)

    asyncio.run(asyncio.wait_for(run(), WATCHDOG))
    assert len(processes) == settings.get("count", 1)
    assert not any(process.is_running() for process in processes)


def test_answers_and_errors_are_returned_unchanged(capfd):
    async def scenario(group):
        process = group.engines[0].process
        answers = await group.generate([request(ECHO, 7), request(ECHO, 8)])
        assert [answer.token_ids.tolist() for answer in answers] == [[ECHO, 7], [ECHO, 8]]
        with pytest.raises(RolloutError, match=r"^engine 0 \(process \d+\): too long\. Try: a shorter prompt$"):
            await group.generate([request(REJECTS)])
        with pytest.raises(BackendError, match=r"^engine 0 \(process \d+\): ZeroDivisionError: by zero$"):
            await group.generate([request(FAILS)])
        waiting = asyncio.create_task(group.generate([request(WAITS)]))
        await process.call(EngineWorker.resume)  # answered once the engine is working on the request
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        async def wait_for_cancellation():
            while True:
                await process.call(EngineWorker.health)

        with pytest.raises(RolloutError, match="1 cancelled"):
            await wait_for_cancellation()

    with_engines(scenario)
    stderr = capfd.readouterr().err
    assert "unexpected error in engine 0" in stderr
    assert "ZeroDivisionError" in stderr


def test_a_death_fails_all_calls_and_says_why():
    async def scenario(group):
        first, second = group.engines
        waiting = asyncio.gather(
            first.process.call(EngineWorker.generate, [request(WAITS)]),
            first.process.call(EngineWorker.generate, [request(EXITS)]),
            second.process.call(EngineWorker.generate, [request(KILLED)]),
            return_exceptions=True,
        )
        errors = list(map(str, await waiting))
        last = "exit code 3; the last line of its output: out of ideas. Try: the same command with --load_checkpoint"
        assert all(last in error for error in errors[:2])
        assert "engine 1 (process" in errors[2]
        assert "died: killed by SIGKILL" in errors[2]
        with pytest.raises(DeathError, match="exit code 3"):  # also later
            await first.process.call(EngineWorker.ping)
        with pytest.raises(EngineError, match=r"exit code 3.*, after 0 restarts \(--max_restarts\)"):
            await group.generate([request(ECHO)])

    with_engines(scenario, count=2)


def test_a_dead_engine_is_restarted_and_its_requests_are_generated_again(capfd):
    async def scenario(group):
        pids = [engine.process.child.process.pid for engine in group.engines]
        waiting = asyncio.create_task(group.engines[1].process.call(EngineWorker.ping))
        os.kill(pids[0], signal.SIGKILL)
        requests = [request(ECHO, number, prefix=number) for number in range(8)]
        answers = await group.generate(requests)
        assert [tuple(answer.token_ids) for answer in answers] == [asked.prompt_token_ids for asked in requests]
        await waiting
        now = [engine.process.child.process.pid for engine in group.engines]
        assert now[0] != pids[0]
        assert now[1] == pids[1]

    with_engines(scenario, count=2, max_restarts=1, in_turn=True)
    assert "died: killed by SIGKILL; restarting the engine" in capfd.readouterr().err


def test_a_death_loses_only_the_unfinished_requests_of_its_engine():
    """Answers arrive one by one, so those that an engine has given before its death are not generated again."""

    async def scenario(group):
        process = group.engines[0].process
        slow = [asyncio.create_task(group.generate([request(WAITS, prefix=number)])) for number in (0, 1)]
        while [engine.running for engine in group.engines] != [1, 1]:
            await asyncio.sleep(0)
        group.by_prefix |= {2: group.engines[0], 3: group.engines[1]}
        quick = await asyncio.gather(*(group.generate([request(ECHO, prefix=number)]) for number in (2, 3)))
        # Each engine answers although it is still working on another request.
        assert [completions[0].text for completions in quick] == ["0", "1"]
        os.kill(process.child.process.pid, signal.SIGKILL)
        while group.engines[0].process is process:
            await asyncio.sleep(0)
        await group.engines[1].process.call(EngineWorker.ping)
        await group.engines[1].process.call(EngineWorker.health)  # it has not cancelled its request
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    with_engines(scenario, count=2, max_restarts=1)


def test_requests_of_an_iteration_are_sent_in_one_call(monkeypatch):
    calls = []
    honest = LocalProcess.call

    async def call(process, method, *arguments, **named):
        calls.append(method)
        return await honest(process, method, *arguments, **named)

    async def scenario(group):
        monkeypatch.setattr(LocalProcess, "call", call)
        await asyncio.gather(*(group.generate([request(ECHO, number, prefix=number)]) for number in range(64)))
        assert calls.count(EngineWorker.submit) == 1
        assert calls.count(EngineWorker.collect) < 32

    with_engines(scenario)


def test_a_stopped_process_counts_as_dead(monkeypatch):
    monkeypatch.setattr(engine_process, "GRACE_SECONDS", 0.1)

    async def scenario(group):
        child = group.engines[0].process.child
        os.kill(child.process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(group.generate([request(ECHO)]))
        await child.watch(0.1)
        with pytest.raises(EngineError, match=r"did not react for 0\.1 seconds \(--engine_timeout\)"):
            await waiting

    with_engines(scenario)


def test_an_engine_survives_a_launchers_signals_and_an_unnamed_signal_is_reported():
    async def scenario(group):
        child = group.engines[0].process.child
        waiting = asyncio.create_task(group.engines[0].process.call(EngineWorker.generate, [request(WAITS)]))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a launcher sends them to every process
            os.kill(child.process.pid, number)
        assert (await group.generate([request(ECHO, 7)]))[0].token_ids.tolist() == [ECHO, 7]
        os.kill(child.process.pid, signal.SIGRTMIN + 6)
        with pytest.raises(DeathError, match=f"died: killed by signal {signal.SIGRTMIN + 6}"):
            await waiting

    with_engines(scenario)


def test_an_answer_that_cannot_be_sent_is_an_error(capfd):
    async def scenario(group):
        with pytest.raises(BackendError, match="pickle"):
            await group.engines[0].process.call(EngineWorker.generate, [request(UNSENDABLE)])

    with_engines(scenario)
    assert "unexpected error in engine 0" in capfd.readouterr().err


def test_cancelled_callers_do_not_wait_for_answers_that_are_never_read():
    """Ctrl-C cancels all tasks together, even those that read the engines' answers."""

    async def run():
        async with asyncio.timeout(engine_process.CLOSE_SECONDS), open_stand_ins() as group:
            waiting = asyncio.ensure_future(group.generate([request(WAITS)]))
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.wait({waiting})
            child = group.engines[0].process.child
            with pytest.raises(DeathError):  # immediately
                await child.call("ping", (), {})
            return child.process.pid

    pid = asyncio.run(run())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


TRAINER = """
import asyncio, sys
from tests.rollout.test_engine_process import open_stand_ins

async def main():
    async with open_stand_ins(2) as group:
        print(*(engine.process.child.process.pid for engine in group.engines), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", [True, False])
def test_engines_end_with_the_trainer(killed):
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=command_environ()) as trainer:
        engines = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(engines) == 2
        if killed:
            engines[0].suspend()  # the kernel ends it, not its own code
            trainer.kill()
        else:
            trainer.stdin.close()
        _, alive = psutil.wait_procs(engines, timeout=WATCHDOG)
        assert not alive
        assert trainer.wait(WATCHDOG) == (-signal.SIGKILL if killed else 0)
