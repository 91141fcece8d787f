"""Options that must not change a run (packing, recomputation, micro-batches), and other models (LoRA, MoE)."""

import json

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.data import row_cache
from tests.plain_transformers import load, mean_loss
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, dataset_flags, pairs, steps, verdicts

CASES = {  # command, flags, rows, name of the loss; rows differ in length, and the last batch is smaller
    "sft": ("train_sft", ANSWERS, answers(42), "gpt_loss"),
    "rm": ("train_rm", PAIRS, pairs(42), "loss"),
    "dpo": ("train_dpo", PAIRS | {"eval_split": "train", "learning_rate": 1e-3}, pairs(42), "loss"),
    "kto": ("train_kto", ANSWERS | {"eval_split": "train", "learning_rate": 1e-3}, verdicts(42), "kto_loss"),
    "kd": ("train_kd", ANSWERS | {"eval_split": "train"}, answers(42), "gpt_loss"),
    "prm": ("train_prm", STEPS | {"eval_split": "train"}, steps(42), "prm_loss"),
}


def train_both(case, tmp_path, train, models, **changed):
    """Return losses and gradient norms of a run, and of the same run with some flags changed."""
    command, flags, rows, loss = CASES[case]
    flags = flags | dataset_flags(tmp_path, rows, rows[:9])
    if case == "kd":
        flags["teacher_model"] = models(seed=5)
    plain = train(command, "plain", **flags)
    other = train(command, "other", **flags | changed)
    assert len(plain.train(loss)) == 3
    return [torch.tensor([*ran.train(loss), *ran.train("grad_norm")]) for ran in (plain, other)]


@pytest.mark.parametrize("case", CASES)
def test_packing_does_not_change_the_loss(case, tmp_path, train, models):
    plain, packed = train_both(case, tmp_path, train, models, packing_samples=True)
    assert_close(packed, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_micro_batch_sizes_do_not_change_the_loss(case, tmp_path, train, models):
    plain, other = train_both(case, tmp_path, train, models, micro_train_batch_size=3)
    assert_close(other, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("case", ["sft", "rm", "dpo"])
def test_gradient_checkpointing_does_not_change_the_loss(case, reentrant, tmp_path, train, models):
    flags = {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": reentrant}
    plain, other = train_both(case, tmp_path, train, models, **flags)
    assert_close(other, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["sft", "dpo"])
def test_adapters_learn_and_peft_loads_them(case, tmp_path, train, models):
    command, flags, rows, _ = CASES[case]
    lora = {"lora_rank": 4, "lora_alpha": 8, "gradient_checkpointing": True, "packing_samples": True}
    ran = train(command, **flags | dataset_flags(tmp_path, rows, rows[:9]) | lora | {"learning_rate": 1e-2})
    name = "eval gpt_loss" if case == "sft" else "eval_loss"
    assert ran.evaluation(name)[-1] < ran.evaluation(name)[0]  # six seeds: SFT -0.28 to -0.25, DPO -0.05 to -0.04
    assert not (ran.save_path / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(models())
    merged = PeftModel.from_pretrained(base, ran.save_path).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    load(ran.save_path)[1].save_pretrained(tmp_path / "merged")
    if case == "sft":
        assert mean_loss(tmp_path / "merged", rows[:9]) == pytest.approx(ran.evaluation(name)[-1], abs=1e-5)


def test_a_reward_model_with_adapters_keeps_its_head(tmp_path, train, models):
    command, flags, rows, _ = CASES["rm"]
    ran = train(command, **flags | dataset_flags(tmp_path, rows, pairs(24, seed=1)), lora_rank=4, max_epochs=3)
    assert ran.evaluation("acc_mean")[-1] > 0.8  # 0.92 to 1 over six seeds
    base = AutoModelForSequenceClassification.from_pretrained(models(), num_labels=1)
    model = PeftModel.from_pretrained(base, ran.save_path).eval()
    tokenizer = load(models())[1]
    texts = [f"{row['prompt']}={row[side]}</s>" for side in ("chosen", "rejected") for row in pairs(24, seed=1)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(-1)
    assert scores.mean().item() == pytest.approx(ran.evaluation("reward_mean")[-1], abs=1e-5)


def test_adapters_go_to_the_target_modules(tmp_path, train):
    ran = train(
        "train_sft",
        **ANSWERS,
        **dataset_flags(tmp_path, answers(8), answers(4)),
        lora_rank=2,
        target_modules=["q_proj", "v_proj"],
    )
    saved = json.loads((ran.save_path / "adapter_config.json").read_text())
    assert set(saved["target_modules"]) == {"q_proj", "v_proj"}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_balanced_while_a_mixture_model_learns(kind, packing, tmp_path, train, models):
    held_out = answers(8, seed=1)
    flags = {"pretrain": models(kind), "aux_loss_coef": 0.1, "packing_samples": packing, "max_epochs": 2}
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(48), held_out), **flags)
    assert all(value >= 0.9 for value in ran.train("aux_loss"))
    assert ran.evaluation("eval gpt_loss")[-1] < ran.evaluation("eval gpt_loss")[0] - 1  # six seeds: -2.3 to -2.0
    assert mean_loss(ran.save_path, held_out) == pytest.approx(ran.evaluation("eval gpt_loss")[-1], abs=1e-5)


def test_a_mixture_model_trains_without_balancing(tmp_path, train, models):
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(8), answers(4)), pretrain=models("mixtral"))
    assert "aux_loss" not in ran.metrics[1]


def test_eager_attention_does_not_change_the_loss(tmp_path, train, models):
    plain, eager = train_both("sft", tmp_path, train, models, attn_implementation="eager")
    assert_close(eager, plain, atol=1e-5, rtol=1e-5)


def test_flash_attention_without_a_gpu_reports_the_replacement(tmp_path, train, capsys):
    train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(8), answers(4)), flash_attn=True, bf16=True)
    stderr = capsys.readouterr().err
    assert "flash_attention_2: there is no GPU, so SDPA is used instead" in stderr
    assert "no GPU: everything runs in fp32" in stderr


def test_an_offloaded_reference_does_not_change_the_loss(tmp_path, train, models):
    plain, other = train_both("dpo", tmp_path, train, models, ref_offload=True)
    assert_close(other, plain, atol=0, rtol=0)


def test_optimizer_offloading_has_no_effect_on_a_cpu(tmp_path, train, capsys):
    train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(8), answers(4)), adam_offload=True)
    assert capsys.readouterr().err.count("--adam_offload has no effect") == 1


def test_muon_trains_the_matrices(tmp_path, train):
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(42), answers(4)), optim="muon", max_epochs=3)
    assert ran.train("gpt_loss")[-1] < ran.train("gpt_loss")[0] - 1  # six seeds: -2.9 to -2.8


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("case", CASES)
def test_rows_from_the_cache_do_not_change_a_run(case, tmp_path, train, models, monkeypatch):
    command, flags, rows, _ = CASES[case]
    flags = flags | dataset_flags(tmp_path, rows, rows[:9])
    if case == "kd":
        flags["teacher_model"] = models(seed=5)
    in_memory = train(command, "in_memory", **flags)
    monkeypatch.setattr(row_cache, "MIN_CACHED", 1)
    for start in ("first", "second"):
        assert train(command, start, **flags).metrics == in_memory.metrics
    assert len([*(tmp_path / "cache").rglob("*.arrow")]) == 2  # training and evaluation
