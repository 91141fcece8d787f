"""With LoRA, the reference is the policy without its adapters: no second model, and the same results as with one."""

import shutil

import pytest
import torch

from openrlhf.models.forward import LogProbs
from openrlhf.training.base_reference import BaseReference
from openrlhf.training.local import LocalBackend
from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import ANSWERS, PAIRS, dataset_flags, pairs, verdicts
from tests.training.deepspeed_cases import RATE, SETTINGS, load_network, make_batch, step_batches, train

LORA = {"lora_rank": 4, "learning_rate": 1e-2}
CASES = {"train_dpo": (PAIRS, pairs(42), "loss"), "train_kto": (ANSWERS, verdicts(42), "kto_loss")}


@pytest.mark.parametrize("command", CASES)
def test_preferences_are_learned_as_with_a_separate_reference(command, tmp_path, train, models):
    flags, rows, loss = CASES[command]
    flags = flags | dataset_flags(tmp_path, rows, rows[:9]) | LORA | {"eval_split": "train"}
    shutil.copytree(models(), tmp_path / "copy")
    shared = train(command, "shared", **flags)
    loaded = train(command, "loaded", **flags, ref_pretrain="./copy")
    assert shared.train(loss) == loaded.train(loss)
    assert shared.train("grad_norm") == loaded.train("grad_norm")


@pytest.mark.slow(seconds=3)
def test_the_kl_of_rl_equals_that_to_a_separate_reference(tmp_path, models):
    shutil.copytree(models(), tmp_path / "copy")

    def kl(name, **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": models()}
        flags = {"init_kl_coef": 0.1, "lora_rank": 4, "actor_learning_rate": 2e-2} | flags
        run_command("train_ppo", paths | SMALL | task_flags(tmp_path, make_prompts(32)) | flags)
        return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt").train("kl")

    shared = kl("shared")
    assert shared == kl("loaded", ref_pretrain="./copy")
    assert shared[0] == 0  # adapters start at zero
    assert shared[-1] > 0


def test_the_base_is_the_trained_network_itself(tmp_path, models):
    network = load_network(models(), lora=True)
    backend = LocalBackend(network, SETTINGS, torch.device("cpu"), learning_rate=RATE)
    batch, base = make_batch([5, 7], 1, packed=False), BaseReference(backend)
    before = base.forward(batch, LogProbs).log_probs
    train(backend, [step_batches(0, packed=False)])
    assert base.network is backend.network
    assert torch.equal(base.forward(batch, LogProbs).log_probs, before)
    assert not torch.equal(backend.forward(batch, LogProbs).log_probs, before)


def test_a_reference_on_the_cpu_is_reported_as_part_of_the_policy(tmp_path, train, capsys):
    train("train_dpo", **PAIRS, **dataset_flags(tmp_path, pairs(8), pairs(4)), **LORA, ref_offload=True)
    line = "--ref_offload has no effect with LoRA: the reference is the policy without its adapters"
    assert capsys.readouterr().err.count(line) == 1
