"""Every supervised command, from its command line to a trained model that plain Transformers loads.

The comment next to each bound on learning gives the range over six seeds (--seed).
"""

import math
from statistics import mean, stdev

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from openrlhf.config.check import check
from openrlhf.config.commands import SFTConfig
from openrlhf.config.parser import parse
from openrlhf.training import supervised
from tests.commands import run_command
from tests.plain_transformers import load, log_ratios, mean_loss, scores, step_verdicts
from tests.toy_data import (
    ANSWERS,
    EARLY,
    PAIRS,
    STEPS,
    TEMPLATE,
    answers,
    dataset_flags,
    pairs,
    steps,
    verdicts,
    write_rows,
)


@pytest.mark.slow(seconds=2)
def test_sft_learns_and_reports_the_loss_of_the_saved_model(tmp_path, train):
    held_out = answers(30, seed=1)
    ran = train("train_sft", **dataset_flags(tmp_path, answers(150), held_out), **ANSWERS, max_epochs=6)
    losses = ran.evaluation("eval gpt_loss")
    assert losses[0] > 4
    assert losses[-1] < 1  # 0.01 to 0.23
    assert ran.train("gpt_loss")[-1] < 1  # 0.01 to 0.25
    assert mean_loss(ran.save_path, held_out) == pytest.approx(losses[-1], abs=1e-5)


def test_pretrain_mode_learns_the_whole_text(tmp_path, train):
    rows = [{"input": row["input"] + row["output"] + "abcdefgh"} for row in answers(60)]
    ran = train("train_sft", **dataset_flags(tmp_path, rows[:50], rows[50:]), pretrain_mode=True, max_epochs=3)
    losses = ran.evaluation("eval gpt_loss")
    assert losses[-1] < losses[0] - 1  # -2.9 to -2.8


def conversations(rows):
    return [
        {"input": [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}] * 2}
        for row in rows
    ]


@pytest.mark.parametrize("flags", [{}, {"multiturn": True}], ids=["last turn", "every turn"])
def test_sft_learns_conversations(flags, tmp_path, train):
    rows = conversations(answers(80))
    ran = train(
        "train_sft", **dataset_flags(tmp_path, rows[:64], rows[64:]), apply_chat_template=True, max_epochs=3, **flags
    )
    losses = ran.evaluation("eval gpt_loss")
    assert losses[-1] < losses[0] / 2  # 0.25 to 0.27 of it


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["own pad", "pad is eos"])
def test_a_reward_model_learns_the_preference_and_scores_equally_in_plain_transformers(
    pad_is_eos, tmp_path, train, models
):
    held_out = pairs(24, seed=1)
    base = models(pad_is_eos=pad_is_eos)
    ran = train("train_rm", **dataset_flags(tmp_path, pairs(128), held_out), **PAIRS, pretrain=base, max_epochs=2)
    assert ran.evaluation("acc_mean")[-1] > 0.9  # always 1
    assert ran.evaluation("eval_loss")[-1] < ran.evaluation("eval_loss")[0] / 2  # at most 0.03 of it

    texts = [TEMPLATE.format(row["prompt"]) + row[side] for side in ("chosen", "rejected") for row in held_out]
    got = scores(ran.save_path, texts)
    chosen, rejected = got.chunk(2)
    assert (chosen > rejected).double().mean() == pytest.approx(ran.evaluation("acc_mean")[-1])
    assert -torch.nn.functional.logsigmoid(chosen - rejected).mean().item() == pytest.approx(
        ran.evaluation("eval_loss")[-1], abs=1e-5
    )
    assert ran.config["mean"] == pytest.approx(mean(got.tolist()), abs=1e-5)
    assert ran.config["std"] == pytest.approx(stdev(got.tolist()), abs=1e-5)
    assert (ran.config["mean"], ran.config["std"]) == (
        ran.evaluation("reward_mean")[-1],
        ran.evaluation("reward_std")[-1],
    )
    assert (ran.config["value_head_prefix"], ran.config["normalize_reward"]) == ("score", False)
    tokenizer = AutoTokenizer.from_pretrained(ran.save_path)
    assert ran.config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_run_of_warm_up_steps_only_is_reported(tmp_path, train, capsys):
    flags = (
        dataset_flags(tmp_path, answers(16), answers(4)) | ANSWERS | {"lr_scheduler": "linear", "lr_warmup_ratio": 0.03}
    )
    train("train_sft", **flags)
    assert "the only optimizer step is warm-up (--lr_warmup_ratio 0.03)" in capsys.readouterr().err
    train("train_sft", "longer", max_epochs=2, **flags)
    assert "warm-up" not in capsys.readouterr().err


def test_a_reward_model_without_evaluation_data_uses_training_rows_for_its_statistics(tmp_path, train, capsys):
    ran = train("train_rm", dataset=write_rows(tmp_path / "a.jsonl", pairs(110)), **PAIRS, max_steps=2)
    assert (
        "no --eval_dataset or --eval_size: the mean and std of scores are computed on the first 100 training rows"
        in capsys.readouterr().err
    )
    assert ran.config["mean"] == ran.evaluation("reward_mean")[-1] != ran.evaluation("reward_mean")[0]


@pytest.mark.parametrize("flags", [{"loss": "logexp"}, {"margin_loss": True}], ids=["logexp", "margin"])
def test_a_reward_model_learns_with_its_other_losses(flags, tmp_path, train):
    rows = [row | {"margin": 0.5} for row in pairs(96)]
    ran = train("train_rm", **dataset_flags(tmp_path, rows, pairs(24, seed=1)), **PAIRS, **flags)
    assert ran.evaluation("acc_mean")[-1] > 0.9  # always 1


DPO = {"eval_split": "train", "learning_rate": 3e-3}


def test_dpo_learns_the_preference_and_reports_the_saved_models_metrics(tmp_path, train, models):
    held_out = pairs(24, seed=1)
    ran = train("train_dpo", **dataset_flags(tmp_path, pairs(128), held_out), **PAIRS | DPO, beta=0.2)
    assert ran.evaluation("acc_mean")[-1] > 0.9  # always 1
    assert ran.evaluation("eval_loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert ran.evaluation("eval_loss")[-1] < 0.5  # 0.24 to 0.26

    prompts = [TEMPLATE.format(row["prompt"]) for row in held_out]
    ratios = [
        log_ratios(ran.save_path, models(), prompts, [row[side] for row in held_out]) for side in ("chosen", "rejected")
    ]
    loss = -torch.nn.functional.logsigmoid(0.2 * (ratios[0] - ratios[1])).mean()
    assert loss.item() == pytest.approx(ran.evaluation("eval_loss")[-1], abs=1e-5)
    assert (0.2 * ratios[0]).mean().item() == pytest.approx(ran.evaluation("chosen_reward")[-1], abs=1e-4)
    assert (0.2 * ratios[1]).mean().item() == pytest.approx(ran.evaluation("reject_reward")[-1], abs=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        {"ipo": True, "beta": 0.5},
        {"ipo": True, "ipo_length_average": True},
        {"label_smoothing": 0.1},
        {"nll_loss_coef": 0.5},
    ],
    ids=["ipo", "length average", "cdpo", "nll"],
)
def test_the_other_dpo_losses_learn_the_preference(flags, tmp_path, train):
    ran = train("train_dpo", **dataset_flags(tmp_path, pairs(96), pairs(24, seed=1)), **PAIRS | DPO, **flags)
    assert ran.evaluation("acc_mean")[-1] > 0.85  # 0.96 to 1 for IPO, else always 1
    assert ran.evaluation("eval_loss")[-1] < 0.9 * ran.evaluation("eval_loss")[0]  # 0.10 to 0.80 of it
    if "nll_loss_coef" in flags:
        assert ran.train("nll_loss")[-1] < ran.train("nll_loss")[0]  # -0.58 to -0.53


def test_dpo_uses_a_separate_reference(tmp_path, train, models):
    ran = train(
        "train_dpo", **dataset_flags(tmp_path, pairs(16), pairs(8, seed=1)), **PAIRS | DPO, ref_pretrain=models(seed=3)
    )
    assert ran.evaluation("eval_loss")[0] != pytest.approx(math.log(2), abs=1e-3)


def test_kto_separates_good_from_bad_responses(tmp_path, train, models):
    held_out = verdicts(24, seed=1)
    flags = {"beta": 0.2, "eval_split": "train", "learning_rate": 3e-3}
    ran = train("train_kto", **dataset_flags(tmp_path, verdicts(160), held_out), **ANSWERS, **flags)
    assert ran.evaluation("chosen_reward")[-1] > 0 > ran.evaluation("reject_reward")[-1]  # at most -0.60
    assert ran.evaluation("eval_loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert ran.evaluation("eval_loss")[-1] < 0.4  # 0.35 to 0.36
    assert ran.train("kto_loss")[-1] < 0.45  # 0.34 to 0.39

    good = [row for row in held_out if row["label"]]
    ratios = log_ratios(
        ran.save_path, models(), [TEMPLATE.format(row["input"]) for row in good], [row["output"] for row in good]
    )
    assert (0.2 * ratios).mean().item() == pytest.approx(ran.evaluation("chosen_reward")[-1], abs=1e-4)


def test_kd_moves_the_student_towards_the_teacher(tmp_path, train, models):
    """The distance is KL(teacher || student) on held-out text, from the saved models."""
    held_out = answers(20, seed=1)
    teacher = models(seed=5, num_hidden_layers=1)
    ran = train(
        "train_kd",
        **dataset_flags(tmp_path, answers(128), held_out),
        **ANSWERS,
        teacher_model=teacher,
        kd_coef=1.0,
        eval_split="train",
        max_epochs=3,
    )
    distil = ran.train("distil_loss")
    assert distil[-1] < distil[0]  # -0.011 to -0.010

    def distance(folder):
        (student, tokenizer), (other, _) = load(folder), load(teacher)
        total = 0.0
        for row in held_out:
            ids = tokenizer(TEMPLATE.format(row["input"]) + row["output"], return_tensors="pt").input_ids
            with torch.no_grad():
                ours, theirs = (model(ids).logits[0, -2:].log_softmax(-1) for model in (student, other))
            total += (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
        return total / len(held_out)

    assert distance(ran.save_path) < distance(models()) / 2  # 0.08 to 0.15 of it


def test_kd_with_coefficient_zero_equals_sft(tmp_path, train, models):
    files = dataset_flags(tmp_path, answers(32), answers(8, seed=1))
    taught = train(
        "train_kd", "taught", **files, **ANSWERS, teacher_model=models(seed=5), kd_coef=0, eval_split="train"
    )
    alone = train("train_sft", "alone", **files, **ANSWERS)
    assert_close(taught.evaluation("eval gpt_loss"), alone.evaluation("eval gpt_loss"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_a_process_reward_model_learns_step_labels(soft, tmp_path, train):
    held_out = steps(24, seed=1, soft=soft)
    files = dataset_flags(tmp_path, steps(128, soft=soft), held_out)
    ran = train("train_prm", **files, **STEPS, eval_split="train", max_epochs=4)
    assert ran.evaluation("eval acc")[-1] > 0.85  # 0.94 to 1
    assert ran.evaluation("eval prm_loss")[-1] < ran.evaluation("eval prm_loss")[0]  # -0.68 to -0.21
    assert (ran.config["placeholder_token"], ran.config["reward_tokens"]) == ("#", ["+", "-"])

    right = [
        (verdict == 0) == (letter in EARLY)
        for row in held_out
        for verdict, letter in zip(step_verdicts(ran.save_path, row["input"]).tolist(), row["input"][::2], strict=True)
    ]
    assert mean(right) == pytest.approx(ran.evaluation("eval acc")[-1])


def test_a_process_reward_model_learns_over_the_whole_vocabulary(tmp_path, train):
    files = dataset_flags(tmp_path, steps(128), steps(24, seed=1))
    ran = train("train_prm", **files, placeholder_token="#", eval_split="train", max_epochs=4)
    assert ran.evaluation("eval acc")[-1] > 0.85  # 0.95 to 1


def test_a_command_runs_from_python(tmp_path, models, monkeypatch):
    files = dataset_flags(tmp_path, answers(20), answers(8, seed=1))
    argv = ["--pretrain", models(), "--dataset", files["dataset"], "--eval_dataset", files["eval_dataset"]]
    argv += ["--output_key", "output", "--train_batch_size", "8", "--save_path", "out"]
    result = supervised.run(check(parse(SFTConfig, argv)))
    assert result.save_path.resolve() == tmp_path / "out"
    assert result.steps == 6  # the last 4 rows are a step, in both epochs
    timings = {"timing/step_total", "timing/tokens_per_second"}
    assert set(result.train) == {"gpt_loss", "loss_mean", "lr", "grad_norm"} | timings
    assert set(result.evaluation) == {"eval_loss", "eval gpt_loss"}


def test_a_run_stops_after_max_steps_and_evaluates_the_saved_model(tmp_path, train):
    held_out = answers(8, seed=1)
    ran = train("train_sft", **dataset_flags(tmp_path, answers(64), held_out), **ANSWERS, max_steps=2)
    assert [line["step"] for line in ran.metrics] == [0, 1, 2, 2]
    assert mean_loss(ran.save_path, held_out) == pytest.approx(ran.evaluation("eval gpt_loss")[-1], abs=1e-5)


def test_a_dry_run_writes_nothing(tmp_path, models):
    dataset = write_rows(tmp_path / "a.jsonl", answers(4))
    run_command("train_sft", {"pretrain": models(), "dataset": dataset, "dry_run": True, **ANSWERS})
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
