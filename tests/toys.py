"""Toy data that a model of a few thousand parameters learns in seconds, and commands run on it in this process."""

import json
import os
import random
import subprocess
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.warm import warm_python

DEADLINE = 300  # seconds: a watchdog, not an expectation
EARLY, LATE = "abcdefghijklm", "nopqrstuvwxyz"
TEMPLATE = "{}="
ANSWERS = {"output_key": "output", "input_template": TEMPLATE}  # flags for answers and verdicts
PAIRS = {"prompt_key": "prompt", "input_template": TEMPLATE}
STEPS = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}
FAST = {  # flags that suit a tiny model
    "train_batch_size": 16,
    "micro_train_batch_size": 8,
    "max_epochs": 1,
    "learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "lr_scheduler": "constant",
}


def word(chance, letters, longest=6):
    return "".join(chance.choice(letters) for _ in range(chance.randint(2, longest)))


def answers(count, seed=0):
    """A word, and its last letter in capitals."""
    chance = random.Random(seed)
    prompts = [word(chance, "abcdef") for _ in range(count)]
    return [{"input": prompt, "output": prompt[-1].upper()} for prompt in prompts]


def pairs(count, seed=0):
    """Words of early letters are preferred to words of late ones."""
    chance = random.Random(seed)
    return [
        {"prompt": word(chance, EARLY + LATE), "chosen": word(chance, EARLY), "rejected": word(chance, LATE)}
        for _ in range(count)
    ]


def verdicts(count, seed=0):
    """The same taste, one word at a time, good and bad in turn."""
    chance = random.Random(seed)
    return [
        {"input": word(chance, EARLY + LATE), "output": word(chance, LATE if row % 2 else EARLY), "label": 1 - row % 2}
        for row in range(count)
    ]


def steps(count, seed=0, *, soft=False):
    """Letters, each followed by #: an early one is a good step."""
    chance = random.Random(seed)
    texts = ["".join(chance.choice(EARLY + LATE) + "#" for _ in range(chance.randint(2, 5))) for _ in range(count)]
    good = [[letter in EARLY for letter in text[::2]] for text in texts]
    marks = {True: 0.9, False: 0.2} if soft else {True: "+", False: "-"}
    return [
        {"input": text, "label": [marks[mark] for mark in marked]} for text, marked in zip(texts, good, strict=True)
    ]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data(folder, rows, held_out):
    """Flags that name training and evaluation files with these rows."""
    return {
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "eval_dataset": write_rows(folder / "held_out.jsonl", held_out),
    }


def as_argv(flags):
    """{"bf16": True, "reward_tokens": ["+", "-"]} as words of a command line."""
    argv = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        argv += [] if value is None else [f"--{name}", *map(str, values)]
    return argv


def begin(tmp_path, command, flags):
    """The command in a process of its own."""
    words = [*warm_python(), "-m", f"openrlhf.cli.{command}", *as_argv(flags)]
    with (tmp_path / "said.txt").open("w") as said:
        return subprocess.Popen(words, cwd=tmp_path, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"})


def when(process, happened):
    """Waits until something has happened while the process runs."""
    for _ in range(DEADLINE * 200):
        if happened():
            return
        try:
            code = process.wait(timeout=0.005)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the run ended with {code} before its time")
    process.kill()
    raise AssertionError("the run takes forever")


def run(command, flags):
    """The command as its module runs it, in this process."""
    import_module(f"openrlhf.cli.{command}").main(as_argv(flags))


@dataclass(frozen=True)
class Ran:
    """What a finished command left behind."""

    save_path: Path
    ckpt_path: Path

    @property
    def metrics(self):
        lines = (self.save_path / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]  # less the seconds, which no two runs share
        return [{name: value for name, value in row.items() if not name.startswith("timing/")} for row in rows]

    def train(self, name):
        return [line[name] for line in self.metrics if line["kind"] == "train"]

    def evaluation(self, name):
        return [line[name] for line in self.metrics if line["kind"] == "eval"]

    @property
    def config(self):
        return json.loads((self.save_path / "config.json").read_text())
