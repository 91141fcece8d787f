"""An RL run that was killed or stopped resumes like an uninterrupted one, bit for bit."""

import shutil
import signal
import subprocess
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.training.folder_lock import hold_folder
from tests.commands import DEADLINE, FinishedRun, run_command, start_command, wait_until
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import write_rows
from tests.warm import kill

pytestmark = pytest.mark.slow(seconds=4)
STEPS = 12
PPO = {
    "advantage_estimator": "gae",
    "init_kl_coef": 0.05,
    "kl_target": 0.01,
    "kl_horizon": 200,
    "enable_ema": True,
    "ema_beta": 0.8,
    "max_epochs": 2,
    "train_batch_size": 12,
    "lr_scheduler": "cosine_with_min_lr",
}
HELD_OUT = {"eval_dataset": None, "eval_size": 3}
CASES = {
    "sync": PPO,
    "async": {"async_train": True, "async_queue_size": 1, "enable_vllm_is_correction": True},
    "lora": {"lora_rank": 4, "lora_dropout": 0.2, "async_train": True, "async_queue_size": 2, **HELD_OUT},
    "filtered": {
        "dynamic_filtering": True,
        "dynamic_filtering_reward_range": [0.2, 0.9],
        "lr_scheduler": "cosine",
        "lr_warmup_ratio": 0.2,
    },
}


@pytest.fixture
def case(tmp_path, models):
    """Return a function that gives the flags of a run of at most twelve steps with its own save path."""

    def make(kind, name, **more):
        paths = {"pretrain": models(), "save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt"}
        held_out = write_rows(tmp_path / "held_out.jsonl", make_prompts(3))
        rhythm = {"save_steps": 3, "eval_dataset": held_out, "eval_steps": 2, "max_ckpt_num": 99}
        rows = task_flags(tmp_path, make_prompts(STEPS * 4))
        return paths | SMALL | {"rollout_batch_size": 4} | rhythm | rows | CASES[kind] | more

    return make


def finish(tmp_path, flags):
    run_command("train_ppo", flags)
    name = flags["save_path"]
    return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")


def assert_same(resumed, uninterrupted):
    """Compare weights, metrics and the whole last checkpoint."""
    assert resumed.metrics == uninterrupted.metrics
    (weights,) = (path.name for path in uninterrupted.save_path.glob("*model.safetensors"))
    assert (resumed.save_path / weights).read_bytes() == (uninterrupted.save_path / weights).read_bytes()
    last = (uninterrupted.ckpt_path / "latest").read_text()
    assert (resumed.ckpt_path / "latest").read_text() == last
    ours, theirs = (ran.ckpt_path / last for ran in (resumed, uninterrupted))
    names = sorted(path.relative_to(theirs) for path in theirs.rglob("*.safetensors"))
    assert len(names) >= 3
    for name in names:
        here, there = load_file(ours / name), load_file(theirs / name)
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in here)
    assert (ours / "queue.parquet").read_bytes() == (theirs / "queue.parquet").read_bytes()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_run_resumes_like_an_uninterrupted_one(kind, tmp_path, case):
    uninterrupted = finish(tmp_path, case(kind, "untouched"))
    process = start_command(tmp_path, "train_ppo", case(kind, "killed"))
    wait_until(process, (tmp_path / "killed_ckpt" / "global_step3").exists)
    kill(process.pid)
    assert process.wait(DEADLINE) == -signal.SIGKILL
    resumed = finish(tmp_path, case(kind, "killed", load_checkpoint=True))
    assert len(uninterrupted.train("reward")) == STEPS
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("kind", CASES)
def test_every_checkpoint_leads_to_the_same_result(kind, tmp_path, case):
    uninterrupted = finish(tmp_path, case(kind, "untouched", save_steps=1))
    steps = len(uninterrupted.train("reward"))
    assert steps > 3
    for step in (1, steps // 2, steps - 1, steps):
        root = tmp_path / f"from{step}_ckpt"
        shutil.copytree(uninterrupted.ckpt_path / f"global_step{step}", root / f"global_step{step}")
        (root / "latest").write_text(f"global_step{step}")
        (tmp_path / f"from{step}" / "run").mkdir(parents=True)
        shutil.copy(uninterrupted.save_path / "run" / "metrics.jsonl", tmp_path / f"from{step}" / "run")
        resumed = finish(tmp_path, case(kind, f"from{step}", load_checkpoint=True, save_steps=1))
        assert_same(resumed, uninterrupted)


def test_a_stopped_run_leaves_a_checkpoint_and_prints_the_resume_command(tmp_path, case):
    uninterrupted = finish(tmp_path, case("async", "untouched", num_episodes=3))
    process = start_command(tmp_path, "train_ppo", case("async", "stopped", num_episodes=3, save_steps=-1))
    metrics = tmp_path / "stopped" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    process.terminate()
    assert process.wait(DEADLINE) == 130

    stderr = (tmp_path / "stderr.txt").read_text()
    (folder,) = (path.name for path in (tmp_path / "stopped_ckpt").iterdir() if path.is_dir())  # no partial checkpoint
    assert "openrlhf: stopping after this step, with a checkpoint" in stderr
    assert f"run the same command with --load_checkpoint to resume from stopped_ckpt/{folder}" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "stopped" / "config.json").exists()
    assert_same(finish(tmp_path, case("async", "stopped", num_episodes=3, load_checkpoint=True)), uninterrupted)


def test_a_stop_without_checkpoints_says_that_the_run_cannot_resume(tmp_path, case):
    process = start_command(
        tmp_path, "train_ppo", case("sync", "lost", disable_ds_ckpt=True, save_steps=-1, num_episodes=3)
    )
    metrics = tmp_path / "lost" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    stderr = (tmp_path / "stderr.txt").read_text()
    assert "openrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt)" in stderr
    assert "openrlhf: stopped without a checkpoint (--disable_ds_ckpt), so the run cannot be resumed\n" in stderr


def test_resuming_a_finished_run_says_that_no_steps_are_left(tmp_path, case, capsys):
    flags = case("async", "over", save_steps=STEPS)
    finished = finish(tmp_path, flags).metrics
    assert finish(tmp_path, flags | {"load_checkpoint": True}).metrics == finished
    assert f"the checkpoint is at step {STEPS}: no steps are left to train" in capsys.readouterr().err


def test_a_full_disk_stops_checkpoints_and_records_but_not_the_run(tmp_path, case, file_size_limit, capsys):
    flags = case("sync", "full", max_steps=4, save_steps=2, eval_dataset=None, enable_ema=None, ema_beta=None)
    size = (finish(tmp_path, flags).save_path / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "full_ckpt")
    capsys.readouterr()
    with file_size_limit(2 * size):
        ran = finish(tmp_path, flags)
    stderr = capsys.readouterr().err
    for step in (2, 4):
        assert f"the checkpoint of step {step} was not written: File too large. Training continues" in stderr
    assert not ran.ckpt_path.exists()
    assert (ran.save_path / "model.safetensors").stat().st_size == size
    assert len(ran.train("reward")) == 4
    (earlier,) = (ran.save_path / "run" / "earlier").iterdir()
    assert len(list((earlier / "rollouts").glob("step_*.parquet"))) == 4


def test_a_checkpoint_is_not_begun_without_room_for_it(tmp_path, case, monkeypatch, capsys):
    monkeypatch.setattr("openrlhf.training.disk_space.bytes_free", lambda folder: 1000)
    ran = finish(tmp_path, case("sync", "crowded", max_steps=2, save_steps=2, eval_dataset=None))
    assert "the checkpoint of step 2 is not written: it needs " in capsys.readouterr().err
    assert not ran.ckpt_path.exists()
    assert (ran.save_path / "config.json").exists()


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, case, capsys):
    uninterrupted = finish(tmp_path, case("async", "untouched"))
    for step in (3, 6):
        name = f"global_step{step}"
        shutil.copytree(uninterrupted.ckpt_path / name, tmp_path / "damaged_ckpt" / name)
    path = tmp_path / "damaged_ckpt" / "global_step6" / "queue.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    resumed = finish(tmp_path, case("async", "damaged", load_checkpoint=True))
    assert "damaged checkpoint in damaged_ckpt: global_step6: queue.parquet has " in capsys.readouterr().err
    assert resumed.metrics == [line for line in uninterrupted.metrics if line["step"] > 3]
    shutil.copy(uninterrupted.save_path / "run" / "metrics.jsonl", resumed.save_path / "run")
    assert_same(resumed, uninterrupted)


def test_a_second_run_in_the_same_folders_is_refused_before_models_load(tmp_path, case, capsys):
    flags = case("sync", "held", max_steps=1)
    with hold_folder(tmp_path / "held_ckpt", "--ckpt_path"), pytest.raises(SystemExit) as ended:
        run_command("train_ppo", flags)
    assert ended.value.code == 2
    assert "error: --ckpt_path held_ckpt is in use by another run: process " in capsys.readouterr().err
    assert not (tmp_path / "held").exists()


HANGING = """
import os, time

def reward_func(queries, prompts, labels):
    if queries[0] != prompts[0] + labels[0] + "</s>":  # not the made-up answer of the trial
        with open("hanging.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename("hanging.tmp", "hanging")
        time.sleep(3600)
    return [1.0 for query in queries]
"""


def test_a_second_sigterm_ends_a_run_that_waits_for_a_reward(tmp_path, models):
    paths = {"pretrain": models(), "save_path": "out", "ckpt_path": "ckpt", "reward_timeout": 3600}
    process = start_command(tmp_path, "train_ppo", paths | SMALL | task_flags(tmp_path, make_prompts(8), HANGING))
    wait_until(process, (tmp_path / "hanging").exists)
    worker = int((tmp_path / "hanging").read_text())
    process.terminate()
    wait_until(process, lambda: "stopping after this step" in (tmp_path / "stderr.txt").read_text())
    for _ in range(DEADLINE):  # further ones count from a second after the first
        process.terminate()
        try:
            assert process.wait(1) == 130
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.poll() == 130
    wait_for_end(worker)


def wait_for_end(process):
    """Wait until the process is gone; one that nothing collects remains as a zombie."""
    for _ in range(DEADLINE * 100):
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} is still running")
