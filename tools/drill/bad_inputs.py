"""Wrong command lines, files, rows, models and reward returns: each must give one line of error and leave no files.

The cases of supervised commands are those of tests/cli/test_bad_inputs.py; the ones here are about RL. Exit code 2
means a wrong input. A reward or agent that fails on its trial before training ends with 1, like any failed run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cli.test_bad_inputs import BAD as SUPERVISED
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.tiny import make_model
from tests.toy_data import write_rows
from tools.drill import programs
from tools.drill.damage import ERROR
from tools.drill.outcome import Lost, Outcome, try_all

PATHS = {"save_path": "./out", "ckpt_path": "./ckpt", "use_tensorboard": "./tb"}
OUR_FILES = ("tmp", programs.OUTPUT, "cache", "__pycache__")
RETURNS = {  # bodies of reward functions with a mistake
    "NaN": "return [float('nan')] * len(queries)",
    "infinity": "return {'rewards': [float('inf')] * len(queries)}",
    "one value for all samples": "return [1.0]",
    "nothing": "return None",
    "text": "return ['good'] * len(queries)",
    "a dict without rewards": "return {'score': [1.0] * len(queries)}",
    "two numbers per sample": "return [[1.0, 2.0]] * len(queries)",
    "an object": "return object()",
    "an exception": "raise KeyError('answer')",
    "an exit": "import sys; sys.exit(3)",
    "its own end": "import os; os.kill(os.getpid(), 9)",
}
SOURCES = {  # whole reward files with a mistake
    "a syntax error": "def reward_func(:",
    "no reward_func": "def score(queries): return []",
    "a missing import": "import no_such_package_anywhere",
    "a reward_func that is a number": "reward_func = 3",
}
FLAGS: dict[str, dict[str, object]] = {
    "an unknown flag": {"no_such_flag": 1},
    "text for a number": {"train_batch_size": "many"},
    "a negative number": {"rollout_batch_size": -1},
    "a number out of range": {"eps_clip_low_high": "x"},
    "an unknown choice": {"advantage_estimator": "guess"},
    "an unknown schedule": {"lr_scheduler": "sideways"},
    "a missing reward file": {"remote_rm_url": "./nowhere.py"},
    "a missing prompt file": {"prompt_data": "./nowhere.jsonl"},
    "a missing field": {"input_key": "question"},
    "a missing label field": {"label_key": "truth"},
    "a missing model": {"pretrain": "./nowhere"},
    "a missing agent": {"agent_func_path": "./nowhere.py", "remote_rm_url": None},
    "no reward at all": {"remote_rm_url": None},
    "prompts longer than the limit": {"prompt_max_len": 1},
    "no GPU": {"device": "cuda"},
}


@dataclass(frozen=True)
class BadInput:
    """A command line to build in a folder, and the exit code it must end with."""

    build: Callable[[Path], tuple[str, dict[str, object]]]
    code: int = 2


def drill_bad_inputs(folder: Path, seed: int = 0, limit: int | None = None, at_a_time: int = 2) -> Outcome:
    """Run each wrong input in a separate process."""

    @cache
    def models(kind: str = "llama", **options: object) -> str:
        return make_model(folder / f"model_{kind}_{'_'.join(options)}", kind, **options)

    cases = {
        f"supervised, {name}": BadInput(lambda here, make=make: make(here, models))
        for name, (make, _) in SUPERVISED.items()
    }
    for name, line in RETURNS.items():
        source = f"def reward_func(queries, prompts, labels):\n    {line}\n"
        cases[f"reward returns {name}"] = BadInput(lambda here, source=source: rl_input(here, source), code=1)
    for name, source in SOURCES.items():
        cases[f"reward file with {name}"] = BadInput(lambda here, source=source: rl_input(here, source))
    for name, flags in FLAGS.items():
        cases[f"RL, {name}"] = BadInput(lambda here, flags=flags: rl_input(here, **flags))
    names = random.Random(f"bad {seed}").sample(sorted(cases), limit or len(cases))
    models()

    def drill(name: str) -> None:
        here = folder / name.replace(" ", "_").replace(",", "").replace("/", "")
        here.mkdir()
        command, flags = cases[name].build(here)
        words = programs.command_words(command, {"pretrain": models()} | PATHS | flags)
        before = set(here.rglob("*"))
        code = programs.start(here, words, CUDA_VISIBLE_DEVICES="").wait(programs.WATCHDOG)
        output = programs.read_output(here)
        errors = len(ERROR.findall(output))
        if (code, errors, "Traceback" in output) != (cases[name].code, 1, False):
            raise Lost(f"exit code {code} and {errors} lines of errors: {programs.last_line(here)}")
        left = [path.relative_to(here) for path in here.rglob("*") if path not in before]
        if written := [str(path) for path in left if path.parts[0] not in OUR_FILES]:
            raise Lost(f"it left {', '.join(written)}")
        programs.must_end(here)

    return try_all({name: name for name in names}, drill, at_a_time)


def rl_input(folder: Path, source: str | None = None, **flags: object) -> tuple[str, dict[str, object]]:
    rows = make_prompts(12)
    given = task_flags(folder, rows, source) if source else task_flags(folder, rows)
    write_rows(folder / "prompts.jsonl", rows)
    return "train_ppo", SMALL | given | flags
