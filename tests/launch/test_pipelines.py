"""The pipelines of examples/pipelines on a toy taste: early letters are good, and the policy begins at chance."""

import json
import random
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from toys import EARLY, FAST, LATE, PAIRS, TEMPLATE, pairs, run, word, write_rows

from tests.tiny import make_model

PIPELINES = Path(__file__).parents[2] / "examples" / "pipelines"
GENERATE = f"--input_template {TEMPLATE} --max_new_tokens 8 --micro_batch_size 256"
TRAIN = "--train_batch_size 32 --micro_train_batch_size 32 --lr_warmup_ratio 0 --lr_scheduler constant --max_epochs 1"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy that answers with any letters, a reward model with the taste, prompts to learn from and others."""
    root = tmp_path_factory.mktemp("pipelines")
    base = make_model(root / "base", hidden_size=64, intermediate_size=128)
    chance = random.Random(0)
    rows = [{"input": word(chance, EARLY + LATE), "output": word(chance, EARLY + LATE)} for _ in range(512)]
    train = FAST | {"pretrain": base, "ckpt_path": str(root / "ckpt"), "learning_rate": 3e-3}
    data = write_rows(root / "rows.jsonl", rows)
    flags = {"dataset": data, "output_key": "output", "input_template": TEMPLATE, "max_epochs": 3}
    run("train_sft", train | flags | {"save_path": str(root / "policy")})
    data = write_rows(root / "pairs.jsonl", pairs(512))
    run("train_rm", train | PAIRS | {"dataset": data, "save_path": str(root / "reward"), "max_epochs": 2})
    write_rows(root / "prompts.jsonl", rows[:256])
    held_out = [{"input": word(random.Random(seed), EARLY + LATE)} for seed in range(1000, 1128)]
    write_rows(root / "held_out.jsonl", held_out)
    return root


@pytest.fixture
def pipeline(start, monkeypatch, capsys):
    """Runs a pipeline with its commands in this process; the held-out rewards that it printed, and its commands."""
    monkeypatch.syspath_prepend(PIPELINES)

    def go(name, work, flags, training):
        module = import_module(name)
        given = {flag: str(start / flag) for flag in ("policy", "reward")}
        given |= {flag: str(start / f"{flag}.jsonl") for flag in ("prompts", "held_out")}
        given |= {"folder": name, "generate": GENERATE, "train": f"{TRAIN} {training}"}
        argv = [item for flag, value in given.items() for item in (f"--{flag}", value)] + shlex.split(flags)
        parse = module.parse if name == "conditional_sft" else module.arguments("", iterations=2, samples=8).parse_args
        commands = []

        def in_process(words):
            commands.append(words[0])
            import_module(f"openrlhf.cli.{words[0]}").main(words[1:])

        getattr(module, work)(parse(argv), in_process)
        said = capsys.readouterr().out
        getattr(module, work)(parse(argv), in_process)  # everything lies there: nothing runs again
        return [float(value) for value in re.findall(r"held-out reward \w+: (-?[\d.]+)", said)], commands

    return go


def early_letters(path):
    """Their share among the letters of the answers: the taste itself, whatever the reward model makes of it."""
    text = "".join(json.loads(line)["output"].removesuffix("</s>") for line in Path(path).read_text().splitlines())
    known = [letter for letter in text if letter in EARLY + LATE]
    return sum(letter in EARLY for letter in known) / len(known)


CASES = {  # function, flags of the pipeline, flags of its training, how many commands it is
    "iterative_dpo": ("iterate", "--iterations 2 --prompts_per_iteration 128", "--learning_rate 1e-3", 10),
    "rejection_sampling": ("iterate", "--iterations 2 --prompts_per_iteration 128", "--learning_rate 3e-3", 10),
    "conditional_sft": ("learn", "--samples 8 --wish 1", "--learning_rate 3e-3 --max_epochs 4", 7),
}


@pytest.mark.parametrize("name", CASES)
def test_held_out_reward_rises(name, pipeline):
    work, flags, training, count = CASES[name]
    (before, after), commands = pipeline(name, work, flags, training)
    assert len(commands) == count
    assert after > before + 0.2
    first, last = (early_letters(f"{name}/{when}_answers.jsonl") for when in ("before", "after"))
    assert last > first + 0.1
