"""A device that is full in any phase of RL ends the run with one line that names the phase."""

import pytest
import torch

from openrlhf.rl import controller
from openrlhf.rl.local import SharedSync
from openrlhf.rl.models import Models
from openrlhf.rollout.hf import HFEngine
from tests.commands import run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags


def raise_full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("owner", "method", "phase"),
    [
        (Models, "__post_init__", "loading"),
        (HFEngine, "complete", "generation"),
        (controller, "make_experience", "experience"),
        (Models, "train_policy", "training"),
        (SharedSync, "sync", "sync"),
        (Models, "save", "saving"),
    ],
)
def test_the_phase_is_named(owner, method, phase, tmp_path, models, monkeypatch, capsys):
    original = getattr(owner, method)

    def fail_after_start(*args, **kwargs):  # the sync before the first step is part of the start
        if method == "sync" and args[1] == 0:
            return original(*args, **kwargs)
        return raise_full()

    monkeypatch.setattr(owner, method, fail_after_start)
    flags = SMALL | task_flags(tmp_path, make_prompts(8))
    flags |= {"pretrain": models(), "save_path": "./rl", "ckpt_path": "./rl_ckpt", "save_steps": 1, "device": "cpu"}
    with pytest.raises(SystemExit) as ended:
        run_command("train_ppo", flags)
    assert ended.value.code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert f"out of GPU memory in {phase}" in errors[0]
