"""Toy datasets that a model of a few thousand parameters learns in seconds.

Each kind of row is a rule that a test can check: `answers` for SFT and distillation, `pairs` for reward models and DPO,
`verdicts` for KTO, `steps` for process reward models. The constants next to them are the flags that name their fields.
Rows depend only on `count` and `seed`; `seed=1` is the usual held-out set.
"""

import json
import random

EARLY, LATE = "abcdefghijklm", "nopqrstuvwxyz"  # good letters and bad letters
TEMPLATE = "{}="
ANSWERS = {"output_key": "output", "input_template": TEMPLATE}  # flags for answers and verdicts
PAIRS = {"prompt_key": "prompt", "input_template": TEMPLATE}
STEPS = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}


def word(rng, letters, longest=6):
    """Return a random word of 2 to `longest` of these letters."""
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, longest)))


def answers(count, seed=0):
    """Return rows whose answer is the last letter of the prompt, in upper case."""
    rng = random.Random(seed)
    prompts = [word(rng, "abcdef") for _ in range(count)]
    return [{"input": prompt, "output": prompt[-1].upper()} for prompt in prompts]


def pairs(count, seed=0):
    """Return pairs in which words of early letters are preferred to words of late ones."""
    rng = random.Random(seed)
    return [
        {"prompt": word(rng, EARLY + LATE), "chosen": word(rng, EARLY), "rejected": word(rng, LATE)}
        for _ in range(count)
    ]


def verdicts(count, seed=0):
    """Return single responses with a label: early letters are good. Good and bad responses alternate."""
    rng = random.Random(seed)
    return [
        {"input": word(rng, EARLY + LATE), "output": word(rng, LATE if row % 2 else EARLY), "label": 1 - row % 2}
        for row in range(count)
    ]


def steps(count, seed=0, *, soft=False):
    """Return texts of letters, each followed by #: an early letter is a good step. `soft` labels are probabilities."""
    rng = random.Random(seed)
    texts = ["".join(rng.choice(EARLY + LATE) + "#" for _ in range(rng.randint(2, 5))) for _ in range(count)]
    good = [[letter in EARLY for letter in text[::2]] for text in texts]
    marks = {True: 0.9, False: 0.2} if soft else {True: "+", False: "-"}
    return [
        {"input": text, "label": [marks[mark] for mark in marked]} for text, marked in zip(texts, good, strict=True)
    ]


def write_rows(path, rows):
    """Write rows as JSON lines; return the path as a flag takes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset_flags(folder, rows, held_out):
    """Write training and evaluation files with these rows; return the flags that name them."""
    return {
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "eval_dataset": write_rows(folder / "held_out.jsonl", held_out),
    }
