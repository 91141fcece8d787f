"""The SFT and RM commands printed in upstream's READMEs run; only paths and batch sizes are changed."""

import shlex
from importlib import import_module

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.config.test_snapshots import PRINTED
from tests.toy_data import answers, pairs, write_rows

RUNNABLE = (
    "000 and 003 sft",
    "001 sft",
    "004 sft",
    "004 sft on turns",
    "000 continued pre-training",
    "000 and 003 rm",
    "001 rm",
    "004 rm",
    "dotted sft",
)


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("place", RUNNABLE)
def test_a_command_printed_in_a_readme_runs(place, tmp_path, models, wandb_offline):
    command, printed, _ = PRINTED[place]
    if command == "train_sft":
        rows = [{"question": row["input"], "response": row["output"]} for row in answers(10)]
        folder, kind = "checkpoint/llama3-8b-sft", AutoModelForCausalLM
    else:
        sides = ("chosen", "rejected")
        rows = [{side: conversation(row["prompt"], row[side]) for side in sides} for row in pairs(10)]
        folder, kind = "checkpoint/llama3-8b-rm", AutoModelForSequenceClassification
    changed = {"pretrain": models(), "dataset": write_rows(tmp_path / "rows.jsonl", rows), "train_batch_size": 4}
    words = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    import_module(f"openrlhf.cli.{command}").main([*shlex.split(printed), *words])
    kind.from_pretrained(tmp_path / folder)
    assert len((tmp_path / folder / "run" / "metrics.jsonl").read_text().splitlines()) >= 3
    assert list(tmp_path.rglob("*.wandb"))
