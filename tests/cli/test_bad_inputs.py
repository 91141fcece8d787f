"""Wrong inputs of a user: each gives one line that names the fix, exit code 2, and leaves no files."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.tiny import make_tokenizer
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, pairs, steps, verdicts, write_rows


def sft(folder, models, rows=None, **flags):
    return "train_sft", ANSWERS | {"dataset": write_rows(folder / "a.jsonl", rows or answers(4))} | flags


def rm(folder, models, rows=None, **flags):
    return "train_rm", PAIRS | {"dataset": write_rows(folder / "a.jsonl", rows or pairs(4))} | flags


def dpo(folder, models, rows=None, **flags):
    return "train_dpo", PAIRS | {"dataset": write_rows(folder / "a.jsonl", rows or pairs(4))} | flags


def kto(folder, models, rows=None, **flags):
    return "train_kto", ANSWERS | {"dataset": write_rows(folder / "a.jsonl", rows or verdicts(4))} | flags


def prm(folder, models, rows=None, **flags):
    return "train_prm", STEPS | {"dataset": write_rows(folder / "a.jsonl", rows or steps(4))} | flags


def write_text(folder, name, content):
    (folder / name).write_text(content)
    return f"./{name}"


def folder_without_config(folder):
    (folder / "hollow").mkdir()
    return "./hollow"


def broken_json(folder, models):
    lines = [json.dumps(row) for row in answers(4)]
    dataset = write_text(folder, "b.jsonl", "\n".join([*lines[:2], "{oops", *lines]))
    return "train_sft", ANSWERS | {"dataset": dataset}


def without_weights(folder, models):
    """A model folder whose weights were never copied."""
    (folder / "config_only").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / "config_only" / name).write_text((Path(models()) / name).read_text())
    return sft(folder, models, pretrain="./config_only")


def other_vocabulary(folder, models):
    return "train_kd", sft(folder, models)[1] | {"teacher_model": models(pad_is_eos=True)}


def other_reference(folder, models):
    return dpo(folder, models, ref_pretrain=models(pad_is_eos=True))


def without_chat_template(folder, models):
    """A base model whose tokenizer has no chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "base")
    for name in ("config.json", "model.safetensors"):
        (folder / "base" / name).write_bytes((Path(models()) / name).read_bytes())
    return sft(folder, models, pretrain="./base", apply_chat_template=True)


SAME = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3
STEP = {"input": "a#b#", "label": ["+", "-"]}

# name -> (function that returns the command and its flags, text of the error)
BAD = {
    "wrong key": (
        lambda f, m: sft(f, m, input_key="question"),
        "a.jsonl, row 1: no field 'question'; the row has 'input'",
    ),
    "empty file": (lambda f, m: ("train_sft", ANSWERS | {"dataset": write_text(f, "e.jsonl", "")}), "e.jsonl"),
    "broken JSON": (broken_json, "b.jsonl, line 3"),
    "missing data file": (lambda f, m: ("train_sft", ANSWERS | {"dataset": "./no.jsonl"}), "--dataset ./no.jsonl"),
    "missing eval file": (lambda f, m: sft(f, m, eval_dataset="./no.jsonl"), "--eval_dataset ./no.jsonl"),
    "no data at all": (lambda f, m: ("train_sft", ANSWERS), "--dataset is not given"),
    "unknown model folder": (lambda f, m: sft(f, m, pretrain="./no"), "--pretrain ./no: no such folder"),
    "empty revision": (lambda f, m: sft(f, m, revision=""), "--revision is empty"),
    "empty dataset revision": (lambda f, m: sft(f, m, dataset_revision=""), "--dataset_revision is empty"),
    "folder without config": (
        lambda f, m: sft(f, m, pretrain=folder_without_config(f)),
        "--pretrain ./hollow has no config.json",
    ),
    "folder without weights": (without_weights, "cannot load the model ./config_only"),
    "template without a placeholder": (
        lambda f, m: sft(f, m, input_template="User:"),
        "--input_template 'User:' has no {}",
    ),
    "no output key": (lambda f, m: sft(f, m, output_key=None), "--output_key"),
    "no chat template": (without_chat_template, "--tokenizer_chat_template"),
    "broken chat template": (
        lambda f, m: sft(f, m, apply_chat_template=True, tokenizer_chat_template="{% for"),
        "chat template",
    ),
    "turns without a template": (lambda f, m: sft(f, m, multiturn=True), "--apply_chat_template"),
    "number for a text": (lambda f, m: sft(f, m, [{"input": 3, "output": "b"}]), "row 1, field 'input'"),
    "chosen is rejected": (lambda f, m: dpo(f, m, SAME), "3 with chosen equal to rejected"),
    "chosen is rejected for a reward": (lambda f, m: rm(f, m, SAME), "3 with chosen equal to rejected"),
    "no rejected": (lambda f, m: rm(f, m, rejected_key="worse"), "no field 'worse'"),
    "margin that is text": (lambda f, m: rm(f, m, [pairs(1)[0] | {"margin": "much"}]), "row 1, field 'margin'"),
    "margin without sigmoid": (lambda f, m: rm(f, m, margin_loss=True, loss="logexp"), "--margin_loss"),
    "label of 2": (
        lambda f, m: kto(f, m, [verdicts(1)[0] | {"label": 2}]),
        "row 1, field 'label': expected 0, 1, true",
    ),
    "every row too long": (lambda f, m: sft(f, m, max_len=4), "--max_len 4"),
    "placeholder of two tokens": (
        lambda f, m: prm(f, m, placeholder_token="##"),
        "'##': expected exactly one token of this tokenizer, got 2",
    ),
    "no placeholder": (lambda f, m: prm(f, m, placeholder_token=None), "--placeholder_token is not given"),
    "label that is not a reward token": (
        lambda f, m: prm(f, m, [STEP | {"label": ["+", "?"]}]),
        "expected one of --reward_tokens + - as label, got '?'",
    ),
    "too few labels": (
        lambda f, m: prm(f, m, [STEP | {"label": ["+"]}]),
        "expected as many labels as placeholders '#' (2), got 1",
    ),
    "probability of 2": (lambda f, m: prm(f, m, [STEP | {"label": [0.5, 2.0]}]), "a probability from 0 to 1"),
    "one reward token": (lambda f, m: prm(f, m, reward_tokens=["+"]), "--reward_tokens"),
    "probabilities that do not match": (
        lambda f, m: sft(f, m, dataset_probs="0.5,0.5"),
        "--dataset_probs has 2 values",
    ),
    "unknown scheduler": (lambda f, m: sft(f, m, lr_scheduler="zigzag"), "--lr_scheduler zigzag"),
    "scheduler that follows the loss": (
        lambda f, m: sft(f, m, lr_scheduler="reduce_lr_on_plateau"),
        "--lr_scheduler reduce_lr_on_plateau",
    ),
    "unknown module": (
        lambda f, m: sft(f, m, lora_rank=2, target_modules=["nowhere_proj"]),
        "--target_modules nowhere_proj",
    ),
    "experts of a dense model": (lambda f, m: sft(f, m, aux_loss_coef=0.1), "--aux_loss_coef"),
    "teacher of another vocabulary": (other_vocabulary, "--teacher_model"),
    "reference of another vocabulary": (other_reference, "--ref_pretrain"),
    "no teacher": (lambda f, m: ("train_kd", sft(f, m)[1]), "--teacher_model is not given"),
    "CSV without the column": (
        lambda f, m: ("train_sft", ANSWERS | {"dataset": write_text(f, "c.csv", "question,output\na,b\n")}),
        "c.csv, row 1: no field 'input'",
    ),
    "unreadable config": (lambda f, m: sft(f, m, config=write_text(f, "c.yaml", "{[")), "--config c.yaml is not YAML"),
    "missing config": (lambda f, m: sft(f, m, config="./no.yaml"), "--config no.yaml: no such file"),
    "no GPU": (lambda f, m: sft(f, m, device="cuda"), "--device cuda needs a GPU, but PyTorch finds none"),
    "unknown attention": (lambda f, m: sft(f, m, attn_implementation="magic"), 'attn_implementation="magic"'),
    "bad wandb key": (lambda f, m: sft(f, m, use_wandb="short"), "--use_wandb: API key must have 40"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_input_gives_one_line_and_leaves_no_files(name, tmp_path, models, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if "wandb" in sys.modules:  # it keeps the mode of an earlier test
        sys.modules["wandb"].teardown()
    make, complaint = BAD[name]
    command, flags = make(tmp_path, models)
    before = set(tmp_path.rglob("*"))
    paths = {"pretrain": models(), "save_path": "./out", "ckpt_path": "./ckpt", "use_tensorboard": "./tb"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_command(command, paths | flags)
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "error:" in line]
    assert (len(errors), captured.out) == (1, "")
    assert errors[0].startswith("openrlhf: error: ")
    assert complaint in errors[0]
    assert "Traceback" not in captured.err
    assert ended.value.code == 2
    left = [path for path in tmp_path.rglob("*") if path not in before and "cache" not in path.parts]
    assert left == []


def test_a_missing_split_is_named(tmp_path, models, capsys):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(answers(4))})
    saved.save_to_disk(str(tmp_path / "saved"))
    capsys.readouterr()
    flags = ANSWERS | {"dataset": "./saved", "dataset_split": "validation", "pretrain": models(), "save_path": "./out"}
    with pytest.raises(SystemExit) as ended:
        run_command("train_sft", flags)
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "validation" in line
    assert "train" in line
    assert not (tmp_path / "out").exists()
