"""Whole runs on a real Ray with DeepSpeed and vLLM: they train like one process, and survive or report a death."""

import asyncio
import os
import shlex
import signal

import pytest
import ray
from peft import PeftModel
from ray.util import placement_group, remove_placement_group
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf.cluster import launch
from openrlhf.cluster.actors import ModelWorker
from openrlhf.cluster.calls import Process
from openrlhf.cluster.placement import plan
from openrlhf.cluster.session import connect
from openrlhf.cluster.starter import open_starter
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.errors import BackendError, RolloutError
from openrlhf.rl.engines import engine_spec
from openrlhf.rl.models import Models
from openrlhf.rl.sample_files import read_samples
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.types import Request, SamplingParams
from tests.cluster.ray_machine import WATCHDOG, wait_until_gone
from tests.cluster.ray_runs import (
    AGENT,
    ON_RAY,
    KillOnCall,
    all_samples,
    count_prompts,
    max_log_prob_difference,
    record_pids,
    two_nodes,
)
from tests.commands import FAST, FinishedRun, as_argv, run_command
from tests.config.test_snapshots import PRINTED
from tests.rl.toy_task import make_prompts, read_rollouts, task_flags
from tests.toy_data import PAIRS, STEPS, dataset_flags, pairs, steps, write_rows

pytestmark = pytest.mark.slow(seconds=15)
KILL_DRIVER = """
import os, signal
from pathlib import Path

def reward_func(queries, prompts, labels):
    here = Path(__file__).parent
    driver, metrics = here / "driver", here / "out" / "run" / "metrics.jsonl"
    if driver.exists() and metrics.exists() and metrics.read_text():  # during the second rollout
        os.kill(int(driver.read_text()), signal.SIGKILL)
    return {"rewards": [float(len(query)) for query in queries]}
"""
VLLM = {"head_dim": 32}  # the smallest that vLLM's attention supports on CPU


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with two_nodes(cpus=8):
        yield


@pytest.fixture
def model(models):
    return models(**VLLM)


@pytest.fixture
def run_on_ray(tmp_path, model):
    """Return a function that trains on the toy task, with 8 prompts and 4 samples each per step."""

    def start(name, steps, command="train_ppo_ray", printed="", **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": model}
        given = task_flags(tmp_path, make_prompts(8 * steps))
        if not {"reward_pretrain", "agent_func_path"}.isdisjoint(flags):
            del given["remote_rm_url"]
        argv = [*shlex.split(printed), *as_argv((ON_RAY if not printed else {}) | paths | given | flags)]
        launch.run(check(parse(COMMANDS[command], argv)))
        return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")

    return start


@pytest.fixture
def run_locally(run_on_ray):
    def start(name, steps, **flags):
        return run_on_ray(name, steps, command="train_ppo", **flags | {"runtime": "local"})

    return start


def weights(folder):
    return load_file(f"{folder}/model.safetensors")


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.fixture
def reward_model(tmp_path, model):
    flags = FAST | PAIRS | dataset_flags(tmp_path, pairs(16), pairs(5, seed=1))
    run_command("train_rm", flags | {"pretrain": model, "save_path": "rm", "ckpt_path": "rm_ckpt"})
    return "./rm"  # relative, although the workers run in another folder


@pytest.fixture
def process_model(tmp_path, model):
    rows = write_rows(tmp_path / "steps.jsonl", steps(16))
    run_command(
        "train_prm", FAST | STEPS | {"pretrain": model, "save_path": "prm", "ckpt_path": "prm_ckpt", "dataset": rows}
    )
    return "./prm"


def test_ppo_trains_with_every_model_on_its_own_devices(run_on_ray, model, reward_model, process_model):
    ran = run_on_ray(
        "out",
        2,
        reward_pretrain=f"{reward_model},{process_model}",
        step_rewards=True,
        use_dynamic_batch=True,
        rollout_max_tokens_per_gpu=64,
        advantage_estimator="gae",
        init_kl_coef=0.01,
        actor_num_nodes=2,
        zero_stage=3,
        train_batch_size=16,
        vllm_num_engines=1,
        save_value_network=True,
    )
    assert len(ran.train("critic_loss")) == 2
    assert max(ran.train("staleness")) == 0
    assert count_prompts(ran) == dict.fromkeys(range(16), 4)
    assert {row["version"] for row in read_rollouts(ran, 2)} == {1}
    assert max_log_prob_difference(ran) <= 1e-4
    rewarded = [row for step in (1, 2) for row in read_rollouts(ran, step)]
    assert any(len(row["step_rewards"]) > 1 for row in rewarded)
    for row in rewarded:
        assert row["step_rewards"][-1][0] == len(row["input_ids"]) - 1  # the score of the outcome model
        assert row["reward"] == pytest.approx(sum(value for _, value in row["step_rewards"]))
    trained = AutoModelForCausalLM.from_pretrained(ran.save_path).state_dict()
    assert distance(trained, weights(model)) > 1e-3


@pytest.mark.parametrize(("estimator", "stage"), [("gae", 2), ("gae", 3), ("group_norm", 2)])
def test_one_step_on_two_ranks_equals_one_process(estimator, stage, run_on_ray, run_locally, model):
    flags = {"advantage_estimator": estimator, "init_kl_coef": 0.01, "train_batch_size": 16}
    flags |= {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    local = run_locally("once", 1, **flags)
    two = {f"{role}_num_gpus_per_node": 2 for role in ("actor", "ref", "critic")}
    on_ray = run_on_ray(
        "again", 1, replay="./once/run/rollouts", zero_stage=stage, colocate_all_models=True, **flags | two
    )
    difference, moved = (distance(weights(local.save_path), weights(other)) for other in (on_ray.save_path, model))
    assert difference <= 1e-5
    assert moved > 1e-3


def test_ema_on_two_ranks_averages_the_weights_after_each_step(run_on_ray, run_locally, model):
    flags = {"advantage_estimator": "group_norm", "train_batch_size": 32, "actor_learning_rate": 1e-2}
    local = run_locally("once", 2, save_steps=1, save_hf_ckpt=True, **flags)
    average = {"enable_ema": True, "ema_beta": 0.75}
    on_ray = run_on_ray(
        "again", 2, replay="./once/run/rollouts", zero_stage=3, actor_num_gpus_per_node=2, **flags | average
    )
    first, second, third = (weights(folder) for folder in (model, local.ckpt_path / "global_step1_hf", local.save_path))
    by_hand = {name: 0.75 * (0.75 * first[name] + 0.25 * second[name]) + 0.25 * third[name] for name in first}
    assert distance(weights(on_ray.save_path), by_hand) <= 1e-5
    assert min(distance(by_hand, other) for other in (first, second, third)) > 1e-3


def test_one_step_with_ring_attention_equals_one_process(run_on_ray, run_locally, model):
    """Policy, reference and critic each have two ranks that share every row (--ring_attn_size 2)."""
    flags = {"advantage_estimator": "gae", "init_kl_coef": 0.01, "train_batch_size": 16, "packing_samples": True}
    flags |= {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "save_value_network": True}
    local = run_locally("once", 1, **flags)
    two = {f"{role}_num_gpus_per_node": 2 for role in ("actor", "ref", "critic")}
    on_ray = run_on_ray("again", 1, replay="./once/run/rollouts", zero_stage=3, ring_attn_size=2, **flags | two)
    difference, moved = (distance(weights(local.save_path), weights(other)) for other in (on_ray.save_path, model))
    assert difference <= 1e-5
    assert moved > 1e-3
    for name in ("critic_loss", "policy_loss", "kl"):
        assert on_ray.train(name) == pytest.approx(local.train(name), abs=1e-5)


@pytest.mark.parametrize("more", [{}, {"backend": "fsdp", "enable_ema": True, "ema_beta": 0.5}], ids=["zero", "fsdp"])
def test_tensor_parallel_ranks_train_and_generate_like_one_process(more, run_on_ray, run_locally):
    """Two ranks hold one policy (--ds_tensor_parallel_size 2); a single process replays their samples."""
    flags = {"advantage_estimator": "group_norm", "init_kl_coef": 0.01, "train_batch_size": 16, "save_steps": 1}
    flags |= {
        "actor_learning_rate": 1e-3,
        "save_hf_ckpt": True,
        "adam_eps": 1e-5,
    }  # so that rounding cannot flip the sign of an update
    two = {"actor_num_gpus_per_node": 2, "ref_num_gpus_per_node": 2, "ds_tensor_parallel_size": 2}
    split = run_on_ray("split", 2, colocate_all_models=True, **flags | two | more)
    assert max_log_prob_difference(split) <= 1e-4  # every weight sync was complete
    whole = run_locally("whole", 2, replay="./split/run/rollouts", **flags | more | {"backend": "auto"})
    assert distance(weights(split.save_path), weights(whole.save_path)) <= 1e-5
    assert distance(weights(split.ckpt_path / "global_step1_hf"), weights(split.save_path)) > 1e-3


def test_fsdp_ranks_train_and_generate_like_one_process(run_on_ray, run_locally):
    """Policy, reference and critic are sharded over two ranks; a single process replays their samples."""
    flags = {"advantage_estimator": "gae", "init_kl_coef": 0.01, "train_batch_size": 16, "save_steps": 1}
    flags |= {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "save_value_network": True, "adam_eps": 1e-5}
    two = {f"{role}_num_gpus_per_node": 2 for role in ("actor", "ref", "critic")}
    sharded = run_on_ray("sharded", 2, colocate_all_models=True, backend="fsdp", **flags | two)
    assert max_log_prob_difference(sharded) <= 1e-4  # every weight sync was complete
    whole = run_locally("whole", 2, replay="./sharded/run/rollouts", **flags)
    assert distance(weights(sharded.save_path), weights(whole.save_path)) <= 1e-5
    assert sharded.train("critic_loss") == pytest.approx(whole.train("critic_loss"), abs=1e-5)
    assert (sharded.ckpt_path / "global_step2" / "_critic" / "fsdp" / "rank1.safetensors").is_file()


def test_divided_experts_train_with_the_engines_choices_like_one_process(run_on_ray, run_locally, models):
    """Two ranks hold half of the experts each; a single process replays their samples, and the experts with them."""
    flags = {"pretrain": models("mixtral"), "advantage_estimator": "group_norm", "train_batch_size": 16}
    flags |= {"actor_learning_rate": 1e-3, "adam_eps": 1e-5, "aux_loss_coef": 0.01, "router_replay": True}
    flags |= {"vllm_num_engines": 0, "packing_samples": True, "gradient_checkpointing": True}
    two = {"actor_num_gpus_per_node": 2, "backend": "fsdp", "expert_parallel_size": 2}
    divided = run_on_ray("divided", 2, **flags | two)
    recorded = read_samples(divided.save_path / "run" / "rollouts" / "step_000002.parquet")
    assert all(item.routed_experts.shape == (len(item.input_ids), 2, 2) for item in recorded)
    whole = run_locally("whole", 2, replay="./divided/run/rollouts", **flags)
    assert distance(weights(divided.save_path), weights(whole.save_path)) <= 1e-5
    for name in ("policy_loss", "aux_loss"):
        assert divided.train(name) == pytest.approx(whole.train(name), abs=1e-5)


def test_the_hybrid_command_of_the_readme_trains_adapters(
    run_on_ray, tmp_path, model, reward_model, wandb_offline, monkeypatch
):
    """Engines share the models' devices and sleep while the models work; trained adapters reach the engines.

    One engine is killed while both generate, the other during a sync: each is replaced, and nothing else restarts.
    """
    loaded = record_pids(monkeypatch, EngineWorker.load)
    KillOnCall(monkeypatch, "engine 0", EngineWorker.submit, at=1)
    # The first two calls load the initial weights, and those that the new engine 0 makes all engines load again.
    KillOnCall(monkeypatch, "engine 1", EngineWorker.load, at=3)
    chats = [{"context_messages": [{"role": "user", "content": row["input"]}]} for row in make_prompts(24)]
    two = {f"{role}_num_gpus_per_node": 2 for role in ("actor", "ref", "critic", "reward")}
    _, printed, _ = PRINTED["004 group_norm"]
    ran = run_on_ray(
        "out",
        3,
        printed=printed,
        prompt_data=write_rows(tmp_path / "chats.jsonl", chats),
        reward_pretrain=reward_model,
        vllm_num_engines=2,
        vllm_tensor_parallel_size=1,
        lora_rank=4,
        **two,
        **{name: ON_RAY[name] for name in ("rollout_batch_size", "prompt_max_len", "generate_max_len")},
        train_batch_size=16,
        actor_learning_rate=1e-2,
    )
    assert {name: len(processes) for name, processes in loaded.items()} == {"engine 0": 2, "engine 1": 2}
    assert count_prompts(ran) == dict.fromkeys(range(24), 4)
    assert len(ran.train("kl")) == 3
    assert abs(ran.train("kl")[-1]) > 1e-5  # the adapters changed; the mean may have either sign
    assert max_log_prob_difference(ran) <= 1e-4
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), ran.save_path).merge_and_unload()
    assert distance(merged.state_dict(), weights(model)) > 1e-3


@pytest.fixture
def two_free_devices():
    """Leave two free devices on each node."""
    held = placement_group([{"CPU": 6}] * 2, strategy="STRICT_SPREAD")
    ray.get(held.ready())
    yield
    remove_placement_group(held)


@pytest.mark.usefixtures("two_free_devices")
def test_an_engine_on_two_nodes_gets_all_weights_and_is_replaced_as_a_whole(run_on_ray, monkeypatch, capsys):
    """The policy takes a device of each node, so the engine's two pipeline stages are on different nodes."""
    submits, call = [], Process.call

    async def call_and_lose_a_node(process, method, *arguments, **named):
        if method is EngineWorker.submit:
            submits.append(process)
            if len(submits) == 2:
                process.peers[0].kill()
        return await call(process, method, *arguments, **named)

    monkeypatch.setattr(Process, "call", call_and_lose_a_node)
    flags = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "backend": "fsdp", "init_kl_coef": 0}
    flags |= {"train_batch_size": 16}  # two optimizer steps per rollout, so the policy scores the samples
    ran = run_on_ray("out", 2, vllm_num_engines=1, vllm_pipeline_parallel_size=2, sync_check_every=1, **flags)
    assert max_log_prob_difference(ran) <= 1e-4
    assert count_prompts(ran) == dict.fromkeys(range(16), 4)
    assert len({process.actor for process in submits}) == 2
    stderr = capsys.readouterr().err
    assert "each engine spans 2 nodes, with 1 device on each" in stderr
    assert "lost one of its processes" in stderr


def test_an_engine_that_dies_during_asynchronous_episodes_is_replaced(run_on_ray, tmp_path, model, monkeypatch, capsys):
    (tmp_path / "agent.py").write_text(AGENT)
    killed = KillOnCall(monkeypatch, "engine 1", EngineWorker.submit, at=10)
    _, printed, _ = PRINTED["001 and 004 agent"]
    ran = run_on_ray(
        "out",
        4,
        printed=printed,
        **ON_RAY | {"actor_num_gpus_per_node": 2, "vllm_num_engines": 1, "prompt_max_len": 32},
        vllm_engines_per_gpu=2,
        agent_func_path="./agent.py",
        partial_rollout=True,
        max_restarts=1,
    )
    assert killed.seen > 10  # the new engine also got requests
    assert "engine 1 on" in capsys.readouterr().err
    assert count_prompts(ran) == dict.fromkeys(range(32), 4)
    assert set(ran.train("turns")) == {2.0}
    assert max(ran.train("staleness")) <= 1
    assert all(row["version"] >= row["step"] - 2 for row in all_samples(ran))
    trained = AutoModelForCausalLM.from_pretrained(ran.save_path).state_dict()
    assert distance(trained, weights(model)) > 1e-3


def test_an_unexpected_error_is_reported_with_process_and_traceback(capsys):
    class FailingWorker:
        def take_from(self, items):
            return items.pop()

    process = Process(ray.remote(FailingWorker).remote(), "policy 0", "10.0.0.1")
    with pytest.raises(BackendError, match=r"policy 0 on 10\.0\.0\.1: IndexError: pop from empty list"):
        asyncio.run(process.call(FailingWorker.take_from, []))
    stderr = capsys.readouterr().err
    assert "in take_from" in stderr
    assert "\x1b" not in stderr


def test_a_cancelled_request_is_cancelled_in_its_engine(tmp_path, model):
    flags = ON_RAY | {"pretrain": model} | task_flags(tmp_path, make_prompts(1))
    config = check(parse(COMMANDS["train_ppo_ray"], as_argv(flags)))

    async def wait_for_requests(process, waiting):
        """Wait until this many requests are at the engine, where they wait for weights that never arrive."""
        count = process.actor.__ray_call__
        while await process.answer(count.remote(lambda worker: len(worker.has_weights._waiters))) != waiting:
            pass

    async def scenario():
        async with open_starter(cluster) as starter:
            engines = await starter.start_engines(engine_spec(config), max_restarts=0)
            request = Request((1,), SamplingParams(max_tokens=1))
            request_task = asyncio.create_task(engines.generate([request]))
            await wait_for_requests(engines.engines[0].process, 1)
            request_task.cancel()
            await wait_for_requests(engines.engines[0].process, 0)

    with connect(plan(config), {}) as cluster:
        asyncio.run(asyncio.wait_for(scenario(), WATCHDOG))


def test_a_rank_that_misses_its_deadline_ends_the_run(run_on_ray):
    with pytest.raises(BackendError, match=r"policy 0 on \S+ did not answer within 0\.01 seconds \(--worker_timeout\)"):
        run_on_ray("out", 1, worker_timeout=0.01)


def test_an_engine_death_with_max_restarts_0_ends_the_run(run_on_ray, monkeypatch):
    KillOnCall(monkeypatch, "engine 0", EngineWorker.submit, at=2)
    with pytest.raises(RolloutError, match=r"engine 0 on \S+ died: .*, after 0 restarts \(--max_restarts\)"):
        run_on_ray("out", 2, max_restarts=0)


def test_a_rank_that_dies_during_a_step_ends_the_run_and_the_run_resumes(run_on_ray, monkeypatch, tmp_path, capsys):
    """Before that an engine dies during a sync, which the ranks must survive although they gather weights collectively.

    The queue of an asynchronous run is part of its checkpoint: no sample is lost or trained twice.
    """
    flags = {"actor_num_gpus_per_node": 2, "zero_stage": 3, "save_steps": 1, "async_train": True, "async_queue_size": 1}
    flags |= {"reward_processes": 2}  # one on each node
    with monkeypatch.context() as patch:
        KillOnCall(patch, "engine 1", EngineWorker.load, at=2)
        KillOnCall(patch, "policy 1", ModelWorker.apply, Models.train_policy, at=3)
        with pytest.raises(BackendError, match=r"policy 1 on \S+ died: .*Try: .*--load_checkpoint"):
            run_on_ray("out", 3, **flags)
    ran = FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")
    assert [line["step"] for line in ran.metrics] == [1, 2]
    run_on_ray("out", 3, load_checkpoint=True, vllm_num_engines=1, **flags)
    assert [line["step"] for line in ran.metrics] == [1, 2, 3]
    assert max(ran.train("staleness")) <= 1
    assert count_prompts(ran) == dict.fromkeys(range(24), 4)
    assert "reward.py runs on 2 nodes" in capsys.readouterr().err


def test_workers_and_engines_end_with_a_killed_driver_and_the_next_run_starts(tmp_path, model, machine):
    (tmp_path / "reward.py").write_text(KILL_DRIVER)
    flags = ON_RAY | {"pretrain": model, "save_path": f"{tmp_path}/out", "ckpt_path": f"{tmp_path}/ckpt"}
    flags |= {"prompt_data": write_rows(tmp_path / "prompts.jsonl", make_prompts(16)), "vllm_num_engines": 1}
    flags |= {"remote_rm_url": str(tmp_path / "reward.py")}
    command = ["-m", "openrlhf.cli.train_ppo_ray", *as_argv(flags)]
    home = {"HOME": os.environ["HOME"]}  # where vLLM caches what it compiled for the model
    with machine.start_python(command, **home) as driver:
        (tmp_path / "driver").write_text(str(driver.pid))
        assert driver.wait(WATCHDOG) == -signal.SIGKILL
    processes = machine.processes()
    assert wait_until_gone(processes)
    assert machine.processes() == []
    assert len((tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()) == 1

    (tmp_path / "driver").unlink()
    with machine.start_python(command, **home) as driver:
        _, stderr = driver.communicate(timeout=WATCHDOG)
    assert driver.returncode == 0, stderr
    lines = [line for line in stderr.splitlines() if line and not line.startswith(("  ", "train: "))]
    ours = ("openrlhf: ", "from LD_PRELOAD cannot be preloaded")  # from the dynamic loader, if this path has a space
    assert [line for line in lines if not any(words in line for words in ours)] == []  # no line from Ray or vLLM
    assert machine.processes() == []
