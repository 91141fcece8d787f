"""Commands under a launcher: two processes with DeepSpeed or FSDP train like one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.commands import (
    DEADLINE,
    FAST,
    FinishedRun,
    as_argv,
    free_port,
    run_command,
    start_ranks,
    start_two_ranks,
    wait_until,
)
from tests.tiny import make_model
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, dataset_flags, pairs, steps, verdicts
from tests.warm import kill, warm_children

pytestmark = pytest.mark.slow(seconds=4)
# 19 rows in steps of 8: ranks with unequal shares, fillers, and a last batch of three rows. Adam's epsilon is large
# enough that a gradient of zero, up to rounding, moves nothing.
SHAPE = {"train_batch_size": 8, "micro_train_batch_size": 3, "learning_rate": 1e-3, "adam_eps": 1e-5}
COMMANDS = {
    "sft": ("train_sft", ANSWERS, answers(19), answers(5, seed=1)),
    "dpo": ("train_dpo", PAIRS | {"eval_split": "train"}, pairs(19), pairs(5, seed=1)),
    "kto": ("train_kto", ANSWERS | {"eval_dataset": None, "eval_size": 6}, verdicts(25), []),  # rows are held out
    "rm": ("train_rm", PAIRS, pairs(19), pairs(5, seed=1)),
    "prm": ("train_prm", STEPS | {"eval_split": "train"}, steps(19), steps(5, seed=1)),
    "kd": ("train_kd", ANSWERS | {"eval_split": "train"}, answers(19), answers(5, seed=1)),
}
CASES = [
    (kind, stage, packed, lora)
    for kind in ("sft", "dpo")
    for stage in (2, 3)
    for packed in (False, True)
    for lora in (False, True)
] + [("kto", 3, True, False), ("rm", 3, False, False)]
FSDP = "fsdp"  # in place of a ZeRO stage
CASES += [("sft", FSDP, True, False), ("dpo", FSDP, False, False), ("dpo", FSDP, True, True), ("rm", FSDP, True, False)]
CASES += [
    ("rm", FSDP, False, True),
    ("sft", FSDP, False, True),
    ("kto", FSDP, False, False),
    ("prm", FSDP, True, False),
    ("kd", FSDP, False, False),
]
# Ring attention: two processes share each packed row, and the result must still be that of one process.
RINGS = [("sft", 3, True, False), ("dpo", 2, True, False), ("dpo", 3, True, True), ("rm", 3, True, False)]
RINGS += [("kto", 3, True, False), ("prm", 2, True, False)]
RINGS += [("sft", FSDP, True, False), ("dpo", FSDP, True, True), ("rm", FSDP, True, False)]
RESUMED = "fsdp-resumed"  # SFT with FSDP that stops after the first of two epochs, and a second run that resumes it
TWO_EPOCHS = {"max_epochs": 2}
# Tensor parallelism: two processes divide every matrix, and also save a checkpoint.
SPLIT = [("sft", 2, False, False), ("sft", FSDP, True, False), ("dpo", FSDP, False, True), ("rm", FSDP, False, False)]


def case_id(case):
    kind, stage, packed, lora = case
    sharded = stage if stage == FSDP else f"zero{stage}"
    return f"{kind}-{sharded}-{'packed' if packed else 'padded'}-{'lora' if lora else 'full'}"


def flags_of(case, root, name):
    kind, stage, packed, lora = case
    _, flags, rows, held_out = COMMANDS[kind]
    folder = root / f"data_{kind}"
    folder.mkdir(exist_ok=True)
    paths = {"pretrain": str(root / "model"), "save_path": str(root / name), "ckpt_path": str(root / f"{name}_ckpt")}
    chosen = {"lora_rank": 4 if lora else 0} | ({"packing_samples": True} if packed else {})
    chosen |= {"backend": stage} if stage == FSDP else {"zero_stage": stage}
    chosen |= {"teacher_model": str(root / "model")} if kind == "kd" else {}
    return FAST | SHAPE | dataset_flags(folder, rows, held_out) | paths | flags | chosen


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def trained_by_two(root):
    """Train all cases in one pair of processes, because starting and importing takes most of the time."""
    plan = [(COMMANDS[case[0]][0], as_argv(flags_of(case, root, case_id(case)))) for case in CASES]
    for number, case in enumerate(RINGS):  # one key head at a time, or both
        ring = {"ring_attn_size": 2, "ring_head_stride": 1 + number % 2}
        plan.append((COMMANDS[case[0]][0], as_argv(flags_of(case, root, f"ring-{case_id(case)}") | ring)))
    for case in SPLIT:
        shared = flags_of(case, root, f"split-{case_id(case)}") | {"ds_tensor_parallel_size": 2, "save_steps": 3}
        plan.append((COMMANDS[case[0]][0], as_argv(shared)))
    halves = flags_of(("sft", FSDP, True, False), root, RESUMED) | TWO_EPOCHS | {"save_steps": 3}
    first = ["-m", "openrlhf.cli.train_sft", *as_argv(halves | {"max_steps": 3, "ds_tensor_parallel_size": 2})]
    code = start_ranks(4, root, *first).wait(timeout=DEADLINE)
    assert code == 0, (root / "output.txt").read_text()[-3000:]
    plan.append(("train_sft", as_argv(halves | {"load_checkpoint": True})))
    (root / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("run_commands.py")
    code = start_two_ranks(root, str(script), str(root / "plan.json")).wait(timeout=DEADLINE)
    assert code == 0, (root / "output.txt").read_text()[-3000:]


def have_equal_rng_states(folder):
    """True if both processes would draw the same dropout next."""
    one, two = (load_file(folder / f"rng_rank{process}.safetensors")["cpu"] for process in (0, 1))
    return torch.equal(one, two)


def assert_equal_metrics(found, expected, tolerance):
    for here, there in zip(found.metrics, expected.metrics, strict=True):
        assert here.pop("kind") == there.pop("kind")
        assert here == pytest.approx(there, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_two_processes_train_like_one(case, trained_by_two, root):
    flags = flags_of(case, root, f"{case_id(case)}-alone") | {"backend": "local"}
    run_command(COMMANDS[case[0]][0], flags)
    one, two = (FinishedRun(root / name, root) for name in (f"{case_id(case)}-alone", case_id(case)))
    assert_equal_metrics(two, one, 1e-5)


@pytest.mark.parametrize("case", RINGS, ids=case_id)
def test_ring_attention_ranks_train_like_one_process(case, trained_by_two, root):
    name = f"ring-{case_id(case)}"
    assert_trained_like_one(case, name, root)


@pytest.mark.parametrize("case", SPLIT, ids=case_id)
def test_tensor_parallel_ranks_train_and_save_like_one_process(case, trained_by_two, root):
    name = f"split-{case_id(case)}"
    assert_trained_like_one(case, name, root)
    assert (root / f"{name}_ckpt" / "global_step3" / "state.json").is_file()
    assert have_equal_rng_states(root / f"{name}_ckpt" / "global_step3")  # both process the same rows


def assert_trained_like_one(case, name, root):
    """Train a case in one process, and compare metrics and weights with those of two."""
    run_command(COMMANDS[case[0]][0], flags_of(case, root, f"{name}-alone") | {"backend": "local"})
    assert_equal_metrics(FinishedRun(root / name, root), FinishedRun(root / f"{name}-alone", root), 1e-5)
    weights = "adapter_model.safetensors" if case[3] else "model.safetensors"
    expected, found = (load_file(root / folder / weights) for folder in (f"{name}-alone", name))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5)


def test_a_resumed_fsdp_run_equals_one_process_without_interruption(trained_by_two, root):
    """Four processes that also divide matrices train the first epoch, and two processes the second one."""
    run_command(
        "train_sft", flags_of(("sft", FSDP, True, False), root, "whole-fsdp") | TWO_EPOCHS | {"backend": "local"}
    )
    assert_equal_metrics(FinishedRun(root / RESUMED, root), FinishedRun(root / "whole-fsdp", root), 1e-5)
    assert (root / f"{RESUMED}_ckpt" / "global_step3" / "fsdp" / "rank3.safetensors").is_file()
    assert (root / f"{RESUMED}_ckpt" / "global_step6" / "fsdp" / "rank1.safetensors").is_file()
    expected, found = (load_file(root / name / "model.safetensors") for name in ("whole-fsdp", RESUMED))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_killed_run_of_two_ranks_resumes_like_an_uninterrupted_one(root):
    """SFT on ZeRO-3: SIGKILL to every process after the second checkpoint, then the same command again."""
    case = ("sft", 3, True, False)
    more = {"save_steps": 3, "max_epochs": 4}
    whole, cut = flags_of(case, root, "whole") | more, flags_of(case, root, "cut") | more
    words = ["-m", "openrlhf.cli.train_sft"]
    assert start_two_ranks(root, *words, *as_argv(whole)).wait(timeout=DEADLINE) == 0
    process = start_two_ranks(root, *words, *as_argv(cut | {"max_epochs": 40}))
    wait_until(process, (root / "cut_ckpt" / "global_step6").exists)
    launcher = psutil.Process(process.pid)
    workers = launcher.children(recursive=True)  # torchrun starts them in their own sessions
    for worker in workers:
        kill(worker.pid)
    launcher.kill()
    psutil.wait_procs(workers)
    process.wait(timeout=DEADLINE)
    for folder in (root / "cut_ckpt").glob("global_step*"):
        if folder.name not in ("global_step3", "global_step6"):
            folder.rename(folder.with_name(f"later_{folder.name}"))
    assert start_two_ranks(root, *words, *as_argv(cut | {"load_checkpoint": True})).wait(timeout=DEADLINE) == 0
    assert_equal_metrics(FinishedRun(root / "cut", root), FinishedRun(root / "whole", root), 1e-6)
    last = (root / "whole_ckpt" / "latest").read_text()
    assert not have_equal_rng_states(root / "whole_ckpt" / last)  # different rows need different dropout
    expected, found = (load_file(root / name / "model.safetensors") for name in ("whole", "cut"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_deepspeed_launcher_starts_a_command(root):
    flags = flags_of(("sft", 2, False, False), root, "by_deepspeed") | {"max_steps": 2}
    launcher = Path(sys.executable).with_name("deepspeed")
    done = subprocess.run(
        [
            sys.executable,
            launcher,
            "--num_gpus",
            "2",
            "--master_port",
            free_port(),
            "--module",
            "openrlhf.cli.train_sft",
            *as_argv(flags),
        ],
        cwd=root,
        env={
            **os.environ,
            **warm_children(),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{launcher.parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (root / "by_deepspeed" / "model.safetensors").is_file()
