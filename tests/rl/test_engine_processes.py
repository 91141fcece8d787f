"""RL runs whose vLLM engines are processes of the trainer: the same samples as with one engine in the trainer."""

import asyncio
import os
import signal

import psutil
import pytest

from openrlhf.rollout.engine_process import LocalProcess
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.training.process_state import process_state_restored
from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts, task_flags
from tests.warm import warm_children

VLLM = {"vllm_num_engines": 1, "enforce_eager": True, "vllm_enable_sleep": True, "full_determinism": True}


@pytest.fixture(autouse=True)
def settings_restored():
    """The runs use deterministic kernels, which later tests in this process must not inherit."""
    with process_state_restored():
        yield


def kill_during_generation(monkeypatch, name, at):
    """Kill the engine of this name while it works on its `at`-th call of `submit`."""
    honest = LocalProcess.call
    seen = []

    async def call(process, method, *arguments, **named):
        if method is not EngineWorker.submit or process.child.name != name:
            return await honest(process, method, *arguments, **named)
        seen.append(process)
        answer = asyncio.ensure_future(honest(process, method, *arguments, **named))
        if len(seen) == at:
            await asyncio.sleep(0)  # send the call
            os.kill(process.child.process.pid, signal.SIGKILL)
        return await answer

    monkeypatch.setattr(LocalProcess, "call", call)
    return seen


@pytest.mark.slow(seconds=30)
def test_two_engines_sample_what_one_does_even_if_one_is_killed(tmp_path, models, monkeypatch, capfd):
    flags = SMALL | VLLM | {"max_steps": 2, "pretrain": models(head_dim=32), "sync_check_every": 1}
    flags |= task_flags(tmp_path, make_prompts(16))
    run_command("train_ppo", flags | {"save_path": "./one"})
    for name, value in warm_children().items():
        monkeypatch.setenv(name, value)
    calls = kill_during_generation(monkeypatch, "engine 1", at=2)  # in step 2
    run_command("train_ppo", flags | {"save_path": "./two", "vllm_engines_per_gpu": 2})
    assert len({process.child for process in calls}) == 2
    stderr = capfd.readouterr().err
    assert "died: killed by SIGKILL; restarting the engine" in stderr
    assert "restarting the engine" not in stderr.partition("restarting the engine")[2]
    assert not [child for child in psutil.Process().children() if "engine_server" in " ".join(child.cmdline())]

    one, two = (FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt") for name in ("one", "two"))
    for step in (1, 2):
        ours, theirs = (read_rollouts(ran, step) for ran in (one, two))
        assert len(ours) == 32
        assert [row["input_ids"] for row in theirs] == [row["input_ids"] for row in ours]
        assert {row["version"] for row in theirs} == {step - 1}
    assert max(two.train("rollout/log_prob_difference")) < 1e-4
    assert two.train("actor_grad_norm")[1] == pytest.approx(one.train("actor_grad_norm")[1], rel=1e-4)
