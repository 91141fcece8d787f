"""A run that was killed or stopped resumes like an uninterrupted one, bit for bit."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.config.commands import SFTConfig
from openrlhf.training.atomic_folder import writing
from openrlhf.training.checkpoint import write_state
from openrlhf.training.run_directory import free_folders
from tests.commands import (
    DEADLINE,
    FAST,
    FinishedRun,
    as_argv,
    command_environ,
    run_command,
    start_command,
    wait_until,
)
from tests.plain_transformers import mean_loss
from tests.toy_data import ANSWERS, PAIRS, answers, dataset_flags, pairs, write_rows
from tests.warm import kill

pytestmark = pytest.mark.slow(seconds=2)
# 43 rows in batches of 8: six steps per epoch, the last with three rows
SHAPE = {"train_batch_size": 8, "micro_train_batch_size": 3, "max_epochs": 4, "save_steps": 4}
LAST = 24
LONG = {"max_epochs": 10}  # long enough to be stopped in the middle
LORA = {"lora_rank": 4, "lora_dropout": 0.3, "packing_samples": True}
CASES = {
    "sft": ("train_sft", ANSWERS | LORA, answers(43), answers(5, seed=1), "adapter_model.safetensors"),
    "dpo": (
        "train_dpo",
        PAIRS | {"eval_dataset": None, "eval_size": 5, "learning_rate": 1e-3, "lr_scheduler": "cosine_with_min_lr"},
        pairs(48),
        [],  # rows are held out
        "model.safetensors",
    ),
}


@pytest.fixture
def case(tmp_path, models):
    """Return a function that gives a command and its flags, with its own save path."""

    def make(kind, name, **more):
        command, flags, rows, held_out, _ = CASES[kind]
        paths = {"pretrain": models(), "save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt"}
        return command, paths | FAST | SHAPE | dataset_flags(tmp_path, rows, held_out) | flags | more

    return make


def finish(tmp_path, command, flags):
    """Run the command to its end in this process."""
    run_command(command, flags)
    name = flags["save_path"]
    return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")


def assert_same(resumed, uninterrupted, weights):
    assert resumed.metrics == uninterrupted.metrics
    assert (resumed.save_path / weights).read_bytes() == (uninterrupted.save_path / weights).read_bytes()
    last = (uninterrupted.ckpt_path / "latest").read_text()
    states = [ran.ckpt_path / last for ran in (resumed, uninterrupted)]
    for name in ("optimizer.safetensors", "rng_rank0.safetensors"):
        ours, theirs = (load_file(folder / name) for folder in states)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("kind", CASES)
def test_a_killed_run_resumes_like_an_uninterrupted_one(kind, tmp_path, case):
    uninterrupted = finish(tmp_path, *case(kind, "untouched", **LONG))
    process = start_command(tmp_path, *case(kind, "killed", **LONG))
    wait_until(process, (tmp_path / "killed_ckpt" / "global_step8").exists)
    kill(process.pid)
    assert process.wait(DEADLINE) == -signal.SIGKILL
    resumed = finish(tmp_path, *case(kind, "killed", load_checkpoint=True, **LONG))
    assert_same(resumed, uninterrupted, CASES[kind][-1])


def test_adapters_that_muon_trains_alone_resume(tmp_path, case):
    """All adapters are matrices, so there is no Adam, which counts its steps; Muon does not."""
    muon = {"optim": "muon", "max_epochs": 2}
    uninterrupted = finish(tmp_path, *case("sft", "untouched", **muon))
    finish(tmp_path, *case("sft", "stopped", max_steps=4, **muon))
    resumed = finish(tmp_path, *case("sft", "stopped", load_checkpoint=True, **muon))
    assert resumed.train("gpt_loss") == uninterrupted.train("gpt_loss")
    name = CASES["sft"][-1]
    assert (resumed.save_path / name).read_bytes() == (uninterrupted.save_path / name).read_bytes()


@pytest.mark.parametrize(("kind", "number"), [("sft", signal.SIGINT), ("dpo", signal.SIGTERM)], ids=["int", "term"])
def test_a_stopped_run_leaves_a_checkpoint_and_prints_the_resume_command(kind, number, tmp_path, case):
    uninterrupted = finish(tmp_path, *case(kind, "untouched", **LONG))
    process = start_command(tmp_path, *case(kind, "stopped", save_steps=-1, **LONG))
    metrics = tmp_path / "stopped" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    process.send_signal(number)
    assert process.wait(DEADLINE) == 130

    stderr = (tmp_path / "stderr.txt").read_text()
    (folder,) = (path.name for path in (tmp_path / "stopped_ckpt").iterdir() if path.is_dir())  # no partial checkpoint
    assert (tmp_path / "stopped_ckpt" / "latest").read_text() == folder
    assert "openrlhf: stopping after this step, with a checkpoint" in stderr
    assert f"run the same command with --load_checkpoint to resume from stopped_ckpt/{folder}" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "stopped" / "config.json").exists()

    resumed = finish(tmp_path, *case(kind, "stopped", load_checkpoint=True, **LONG))
    assert_same(resumed, uninterrupted, CASES[kind][-1])


def test_a_run_stopped_before_its_first_step_ends_immediately(tmp_path, case):
    process = start_command(tmp_path, *case("sft", "early"))
    wait_until(process, lambda: "batches" in (tmp_path / "stderr.txt").read_text())
    process.terminate()
    assert process.wait(DEADLINE) == 130
    assert (tmp_path / "stderr.txt").read_text().splitlines()[-1] == "openrlhf: interrupted"
    assert not (tmp_path / "early").exists()
    assert not (tmp_path / "early_ckpt").exists()


@pytest.mark.parametrize("kind", CASES)
def test_every_checkpoint_leads_to_the_same_result(kind, tmp_path, case):
    uninterrupted = finish(tmp_path, *case(kind, "untouched", save_steps=1, max_ckpt_num=LAST + 1))
    for step in (1, 5, 6, 7, 23, 24):  # around the end of an epoch and the end of the run
        root = tmp_path / f"from{step}_ckpt"
        shutil.copytree(uninterrupted.ckpt_path / f"global_step{step}", root / f"global_step{step}")
        (tmp_path / f"from{step}" / "run").mkdir(parents=True)
        shutil.copy(uninterrupted.save_path / "run" / "metrics.jsonl", tmp_path / f"from{step}" / "run")
        resumed = finish(tmp_path, *case(kind, f"from{step}", load_checkpoint=True, save_steps=1))
        assert_same(resumed, uninterrupted, CASES[kind][-1])


def test_a_reward_model_killed_before_its_last_save_keeps_its_statistics(tmp_path, models):
    flags = (
        FAST | PAIRS | dataset_flags(tmp_path, pairs(20), pairs(5, seed=1)) | {"pretrain": models(), "save_steps": 1}
    )
    paths = {"save_path": "rm", "ckpt_path": "rm_ckpt"}
    run_command("train_rm", flags | paths)
    config = (tmp_path / "rm" / "config.json").read_text()
    shutil.rmtree(tmp_path / "rm")
    run_command("train_rm", flags | paths | {"load_checkpoint": True})
    assert (tmp_path / "rm" / "config.json").read_text() == config
    assert json.loads(config)["std"] > 0


def test_without_a_checkpoint_a_run_starts_over_and_says_so(tmp_path, case, capsys):
    command, flags = case("sft", "fresh", max_steps=1, save_steps=-1)
    ran = finish(tmp_path, command, flags | {"load_checkpoint": True})
    assert "--load_checkpoint: there is no checkpoint in fresh_ckpt, so the run starts fresh" in capsys.readouterr().err
    assert len(ran.train("gpt_loss")) == 1


def test_resuming_a_finished_run_says_that_no_steps_are_left(tmp_path, case, capsys):
    command, flags = case("sft", "over", max_epochs=1, save_steps=6)
    finished = finish(tmp_path, command, flags)
    weights, metrics = (finished.save_path / CASES["sft"][-1]).read_bytes(), finished.metrics
    again = finish(tmp_path, command, flags | {"load_checkpoint": True})
    assert "the checkpoint is at step 6: no steps are left to train" in capsys.readouterr().err
    assert (again.save_path / CASES["sft"][-1]).read_bytes() == weights
    assert again.metrics == metrics


def test_changed_flags_are_listed(tmp_path, case, capsys):
    command, flags = case("sft", "changed", max_epochs=1)
    finish(tmp_path, command, flags)
    capsys.readouterr()
    finish(tmp_path, command, flags | {"load_checkpoint": True, "learning_rate": 0.5, "logging_steps": 2})
    stderr = capsys.readouterr().err
    assert "openrlhf: resuming from changed_ckpt/global_step4\n" in stderr
    assert "flags that changed since then: --learning_rate 0.01 -> 0.5, --logging_steps 1 -> 2\n" in stderr


def test_a_checkpoint_of_another_run_in_the_same_folder_is_noticed(tmp_path, case, capsys):
    command, flags = case("sft", "first", max_epochs=1)
    finish(tmp_path, command, flags)
    run_command(command, flags | {"load_checkpoint": True, "save_path": "./second"})
    stderr = capsys.readouterr().err
    line = "the checkpoint belongs to a run with --save_path ./first. Try: a separate --ckpt_path for each run"
    assert line in stderr


def test_a_checkpoint_of_a_run_with_another_model_is_rejected(tmp_path, case, capsys, models):
    command, flags = case("sft", "first", max_epochs=1)
    finish(tmp_path, command, flags)
    with pytest.raises(SystemExit):
        run_command(command, flags | {"load_checkpoint": True, "save_path": "./second", "pretrain": models(seed=5)})
    assert "belongs to another run, with --save_path ./first and --pretrain" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


REFUSED = {
    "rows": (
        {},
        "the data changed since the checkpoint refused_ckpt/global_step4 was written: expected 43 rows, got 42; "
        "resuming would repeat or skip rows",
    ),
    "adapters": ({"lora_rank": 8}, "the checkpoint refused_ckpt/global_step4 does not fit this model"),
    "no adapters": ({"lora_rank": 0}, "the checkpoint refused_ckpt/global_step4 does not fit this model"),
}


@pytest.mark.parametrize("changed", REFUSED)
def test_a_checkpoint_that_does_not_fit_is_rejected_and_kept(changed, tmp_path, case, capsys):
    command, flags = case("sft", "refused", max_epochs=1)
    before = finish(tmp_path, command, flags).metrics
    more, complaint = REFUSED[changed]
    if changed == "rows":
        write_rows(tmp_path / "rows.jsonl", answers(42))
    with pytest.raises(SystemExit) as ended:
        run_command(command, flags | {"load_checkpoint": True} | more)
    assert ended.value.code == 1
    assert f"openrlhf: error: {complaint}" in capsys.readouterr().err
    assert FinishedRun(tmp_path / "refused", tmp_path / "refused_ckpt").metrics == before


def test_the_newest_checkpoints_are_kept(tmp_path, case):
    ran = finish(tmp_path, *case("sft", "kept", save_steps=1, max_ckpt_num=2, max_epochs=1))
    assert sorted(path.name for path in ran.ckpt_path.iterdir()) == ["global_step5", "global_step6", "latest"]
    assert (ran.ckpt_path / "latest").read_text() == "global_step6"


def test_a_checkpoint_may_come_with_a_model_folder(tmp_path, case):
    ran = finish(tmp_path, *case("dpo", "both", save_hf_ckpt=True, max_epochs=1))
    assert sorted(path.name for path in ran.ckpt_path.iterdir()) == ["global_step4", "global_step4_hf", "latest"]
    assert mean_loss(ran.ckpt_path / "global_step4_hf", answers(3)) > 0


def test_model_folders_alone_are_not_checkpoints(tmp_path, case, capsys):
    flags = {"save_hf_ckpt": True, "disable_ds_ckpt": True, "max_epochs": 1, "save_steps": 2}
    command, flags = case("dpo", "models", **flags)
    ran = finish(tmp_path, command, flags)
    names = sorted(path.name for path in ran.ckpt_path.iterdir())
    assert names == ["global_step2_hf", "global_step4_hf", "global_step6_hf"]
    finish(tmp_path, command, flags | {"load_checkpoint": True})
    assert "there is no checkpoint in models_ckpt, so the run starts fresh" in capsys.readouterr().err


def test_other_files_in_the_save_path_are_kept(tmp_path, case):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    finish(tmp_path, *case("sft", "mine", max_steps=1))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_stop_without_checkpoints_says_that_the_run_cannot_resume(tmp_path, case):
    process = start_command(tmp_path, *case("sft", "lost", disable_ds_ckpt=True, save_steps=-1, max_epochs=40))
    metrics = tmp_path / "lost" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    stderr = (tmp_path / "stderr.txt").read_text()
    assert "openrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt)" in stderr
    assert "openrlhf: stopped without a checkpoint (--disable_ds_ckpt), so the run cannot be resumed\n" in stderr
    assert not (tmp_path / "lost_ckpt").exists()


def test_a_second_run_in_the_same_folders_is_refused(tmp_path, case, capsys):
    command, flags = case("sft", "first", **LONG)
    process = start_command(tmp_path, command, flags)
    metrics = tmp_path / "first" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    for flag, (more, fix) in {
        "--save_path first": ({}, "--save_path first_2"),
        "--ckpt_path first_ckpt": ({"save_path": "an other"}, "--ckpt_path 'an other/checkpoints'"),
        "--run_dir first/run": (
            {"save_path": "an other", "ckpt_path": "other_ckpt", "run_dir": "first/run"},
            "another --run_dir",
        ),
    }.items():
        with pytest.raises(SystemExit) as ended:
            run_command(command, flags | more)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert f"error: {flag} is in use by another run: process " in error
        assert error.endswith(f" Try: {fix}, or wait until that run ends\n")
    assert not (tmp_path / "an other").exists()
    assert not (tmp_path / "other_ckpt").exists()
    kill(process.pid)
    process.wait(DEADLINE)
    run_command(command, flags | {"max_steps": 1})  # the lock ended with its process


def test_a_run_with_the_default_folders_gets_two_others():
    both = "--save_path ckpt_2 --ckpt_path ckpt_2/checkpoints"
    assert free_folders(SFTConfig()) == {"--save_path": both, "--ckpt_path": "--ckpt_path ckpt/checkpoints"}


def test_a_second_start_keeps_the_metrics_of_the_first(tmp_path, case, capsys):
    command, flags = case("sft", "twice", max_steps=2)
    first = finish(tmp_path, command, flags)
    content = (first.save_path / "run" / "metrics.jsonl").read_text()
    assert "has a model" not in capsys.readouterr().err
    finish(tmp_path, command, flags | {"max_steps": 1})
    said = capsys.readouterr().err
    assert "--save_path twice has a model, which this run will replace. Try: another" in said
    (earlier,) = (first.save_path / "run" / "earlier").iterdir()
    assert (earlier / "metrics.jsonl").read_text() == content
    assert json.loads((earlier / "config.json").read_text())["flags"]["max_steps"] == 2
    assert f"the record of an earlier run is now in twice/run/earlier/{earlier.name}" in said


def test_a_mistyped_checkpoint_folder_is_an_error_and_not_a_new_run(tmp_path, case, capsys):
    command, flags = case("sft", "typed", max_steps=4)
    before = finish(tmp_path, command, flags).metrics
    with pytest.raises(SystemExit) as ended:
        run_command(command, flags | {"load_checkpoint": True, "ckpt_path": "./typo_ckpt"})
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert "there is no checkpoint in --ckpt_path typo_ckpt, but --run_dir typed/run has the record of an" in stderr
    assert f"Try: --ckpt_path {tmp_path / 'typed_ckpt'}" in stderr
    assert FinishedRun(tmp_path / "typed", tmp_path / "typed_ckpt").metrics == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, case, capsys):
    process = start_command(tmp_path, *case("sft", "young", **LONG | {"save_steps": 1000}))
    metrics = tmp_path / "young" / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    kill(process.pid)
    process.wait(DEADLINE)
    ran = finish(tmp_path, *case("sft", "young", load_checkpoint=True, max_steps=2))
    assert "there is no checkpoint in young_ckpt, so the run starts fresh" in capsys.readouterr().err
    assert len(ran.train("gpt_loss")) == 2
    assert len(list((tmp_path / "young" / "run" / "earlier").iterdir())) == 1


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, case, capsys):
    uninterrupted = finish(tmp_path, *case("dpo", "untouched", max_ckpt_num=9))
    root = tmp_path / "damaged_ckpt"
    for step in (8, 12):
        shutil.copytree(uninterrupted.ckpt_path / f"global_step{step}", root / f"global_step{step}")
    path = root / "global_step12" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = finish(tmp_path, *case("dpo", "damaged", load_checkpoint=True))
    stderr = capsys.readouterr().err
    assert "global_step12: optimizer.safetensors does not match its checksum" in stderr
    assert "openrlhf: resuming from damaged_ckpt/global_step8\n" in stderr
    assert resumed.metrics == [line for line in uninterrupted.metrics if line["step"] > 8]
    shutil.copy(uninterrupted.save_path / "run" / "metrics.jsonl", resumed.save_path / "run")
    assert_same(resumed, uninterrupted, CASES["dpo"][-1])


@pytest.mark.parametrize("name", ["foreign_ckpt", "foreign_ckpt/global_step4/deepspeed/shard.pt"])
def test_pickles_that_other_users_can_write_are_not_loaded(name, tmp_path, case, capsys):
    root = tmp_path / "foreign_ckpt"
    with writing(root / "global_step4") as aside:
        (aside / "deepspeed").mkdir()
        (aside / "deepspeed" / "shard.pt").write_bytes(b"a pickle")
        write_state(aside, {"step": 4, "run": "id", "num_rows": 43, "evaluation": {}, "settings": {}})
    (tmp_path / name).chmod(0o777)
    command, flags = case("sft", "foreign", load_checkpoint=True)
    with pytest.raises(SystemExit) as ended:
        run_command(command, flags)
    assert ended.value.code == 1
    message = f"other users can write {name}, and loading DeepSpeed's checkpoints can run code"
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_is_skipped_and_the_run_goes_on(tmp_path, case, file_size_limit, capsys):
    command, flags = case("dpo", "full", max_epochs=1, save_steps=2)
    size = (tmp_path / finish(tmp_path, command, flags).save_path / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "full_ckpt")
    capsys.readouterr()
    with file_size_limit(2 * size):  # the optimizer has three times the model's size
        ran = finish(tmp_path, command, flags)
    stderr = capsys.readouterr().err
    for step in (2, 4, 6):
        assert f"the checkpoint of step {step} was not written: File too large. Training continues" in stderr
    assert not ran.ckpt_path.exists()
    assert (ran.save_path / "model.safetensors").stat().st_size == size
    assert len(ran.train("loss")) == 6


def test_a_checkpoint_is_not_begun_without_room_for_it(tmp_path, case, monkeypatch, capsys):
    monkeypatch.setattr("openrlhf.training.disk_space.bytes_free", lambda folder: 1000)
    ran = finish(tmp_path, *case("sft", "crowded", max_steps=4))
    stderr = capsys.readouterr().err
    assert "the checkpoint of step 4 is not written: it needs " in stderr
    assert "but crowded_ckpt has 1000 bytes free. Training continues" in stderr
    assert not ran.ckpt_path.exists()
    assert (ran.save_path / "adapter_config.json").exists()


WITH_SMALL_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.slow(seconds=30)
def test_a_full_disk_at_the_end_never_loses_the_model(tmp_path, case):
    """No folder has room for the model until someone makes some."""
    command, flags = case("dpo", "late", max_steps=1, save_steps=-1)
    limit = str((Path(flags["pretrain"]) / "model.safetensors").stat().st_size // 2)
    words = [sys.executable, "-c", WITH_SMALL_FILES, limit, "-m", f"openrlhf.cli.{command}", *as_argv(flags)]
    environ = command_environ(TMPDIR=str(tmp_path))
    with (tmp_path / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(words, cwd=tmp_path, stderr=stderr, env=environ)
    wait_until(process, lambda: "could not be saved anywhere" in (tmp_path / "stderr.txt").read_text())
    assert not (tmp_path / "late" / "config.json").exists()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert process.wait(DEADLINE) == 0
    assert mean_loss(tmp_path / "late", answers(3)) > 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and "model" not in path.name) == ["late"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"seed": 7},
            "with --eval_size 5 --seed 42, so other rows would be held out now. Try: --eval_size 5 --seed",
        ),
        ({"eval_size": 6}, "was written with --eval_size 5 --seed 42"),
        ({"eval_size": None}, "was written with --eval_size 5 --seed 42"),
    ],
)
def test_a_resumed_run_cannot_train_on_rows_that_were_held_out(change, complaint, tmp_path, case, capsys):
    finish(tmp_path, *case("dpo", "first", save_steps=1, max_steps=1))
    command, flags = case("dpo", "first", load_checkpoint=True, **change)
    with pytest.raises(SystemExit):
        run_command(command, flags)
    assert complaint in capsys.readouterr().err


def test_a_resumed_run_cannot_start_holding_out_rows(tmp_path, case, capsys):
    finish(tmp_path, *case("dpo", "first", eval_size=None, save_steps=1, max_steps=1))
    with pytest.raises(SystemExit):
        run_command(*case("dpo", "first", load_checkpoint=True))
    assert "was written without --eval_size, so other rows would be held out now" in capsys.readouterr().err
