"""Print the functions of the package that a GRPO sample passes through, in the order of their first call.

    python tools/journeys.py [--all]

A profiler watches a small real run without Ray, including the worker process of its reward function, and records the
last of its steps. Each function counts once. Properties, lambdas, constructors and formulas of a line or two are not
counted, nor are functions that run in the same step without passing a sample on (`NOT_COUNTED`); `--all` also lists
these. `docs/architecture.md` quotes the result.
"""

import argparse
import ast
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT}/openrlhf/"
STEPS = 3  # the first two include checks; the last is recorded
NEXT_STEP = "Controller._between_steps"  # called before the first step and after each one
STAGES = {  # the function that begins each stage
    "Controller._produce": "Request",
    "HFEngine.complete": "Tokens",
    "FileRewards.score": "Reward",
    "Controller._consume": "Scores",
    "compute_experience": "Advantages",
    "Controller._take_steps": "Step",
}
NOT_COUNTED = {  # patterns of file:function
    "configuration": ["config/*", "*:set_seed", "*:Trained.scale", "*:between_steps"],
    "metrics and records": [
        "*etric*", "*:*mean_of", "*:values_of", "*:whole_loss", "*:Mean.*", "*KL.updated", "rl/record.py:*",
        "rl/sample_files.py:*", "rl/rollout_times.py:*", "*:*loss_scaling", "*utilization*",
    ],
    "checks and timing": [
        "*health.py:*", "training/audit.py:*", "rl/proof.py:*", "rl/gap_causes.py:*", "*:batch_trajectories",
        "*:LocalWorkers.log_probs", "*deadline*", "*:ReportingCoroutine.*", "*:Worker._create_task",
        "rollout/usage.py:*", "rollout/progress.py:*", "*:HFEngine._watched", "*:EpisodeSession.start",
        "training/memory_check.py:*",
    ],
    "clean-up": [
        "*.close", "*._abort", "*:Pool._end_call", "event_loop.py:*", "monitor.py:*", "errors.py:*",
        "rl/checkpoints.py:*", "training/disk_space.py:*",
    ],
    "questions about a model, a batch, a cache or a queue": [
        "*.__len__", "*_between_steps", "*open_rollouts", "*:Controller._pro[bg]*", "*._drop_stale", "*._is_full",
        "*._stragglers", "rl/group_stream.py:*_of", "agents/branches.py:*", "*:Pool._find_worker*", "*._worth_a_copy",
        "*:CachedRows.experts", "models/heads.py:*", "models/modes.py:*", "*:Network.prefixes_of", "*:plain_linear",
        "*.begin_training", "*.wake_policy", "*._use", "*.on_device", "*:temperature_of", "*.has_signal", "*:counts",
        "*.sum_over_ranks", "*._count_experts",
    ],
}  # fmt: skip
UNNAMED = ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "__init__", "__getstate__", "__setstate__")
REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(letter.islower() for letter in query) for query in queries]
"""
FLAGS = """
    --pretrain model --prompt_data prompts.jsonl --remote_rm_url reward.py --prompt_max_len 16 --generate_max_len 8
    --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 8
    --micro_rollout_batch_size 16 --advantage_estimator group_norm --init_kl_coef 0.01 --save_path policy
    --runtime local
"""


def watch(folder: Path) -> None:
    """Record each function of the package when this process calls it for the first time in a step."""
    step = mmap.mmap(os.open(folder / "step", os.O_RDWR), 1)  # shared by all processes
    output = os.open(folder / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: set[tuple[str, str, int]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_qualname == NEXT_STEP:
            step[0] += 1
        key = (code.co_filename[len(PACKAGE) :], code.co_qualname, step[0])
        if key not in seen:
            seen.add(key)
            with suppress(OSError):  # a process that has closed all of its descriptors runs no user code
                os.write(output, json.dumps([time.monotonic_ns(), *key]).encode() + b"\n")

    threading.setprofile(record)
    sys.setprofile(record)


def calls_of_a_step() -> list[tuple[str, str]]:
    """Run GRPO on a toy task; return (file, function) of the calls in its last step, in order."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny import make_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(  # every Python process imports this module when it starts
            f"import sys; sys.path.append({str(ROOT / 'tools')!r})\n"
            f"import journeys, pathlib; journeys.watch(pathlib.Path({name!r}))\n"
        )
        make_model(folder / "model")
        (folder / "reward.py").write_text(REWARD)
        prompts = [{"input": chr(97 + number % 26) * (1 + number % 4)} for number in range(8 * STEPS)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "openrlhf.cli.train_ppo", *FLAGS.split()]
        subprocess.run(words, cwd=folder, check=True, env=environment)
        lines = [json.loads(line) for file in folder.glob("*.calls") for line in file.read_text().splitlines()]
    return list(dict.fromkeys((file, function) for _, file, function, step in sorted(lines) if step == STEPS))


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, bool, int]]:
    """Yield the qualified name of each function in a module, whether it is a property, and its number of lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            body = child.body[1:] if ast.get_docstring(child) else child.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            yield prefix + child.name, any("property" in ast.dump(one) for one in child.decorator_list), lines
            yield from functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def is_hop(file: str, function: str) -> bool:
    """Return whether a sample passes through a function, by the rules above."""
    if function.endswith(UNNAMED):
        return False
    known = functions(ast.parse(Path(PACKAGE, file).read_text(encoding="utf-8")))
    is_property, lines = {name: rest for name, *rest in known}[function]
    if is_property:
        return False
    if lines <= 2 and "." not in function:  # a formula; a method as short as this may only pass a call on
        return False
    return not any(fnmatch(f"{file}:{function}", pattern) for group in NOT_COUNTED.values() for pattern in group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also list the functions that are not counted")
    args = parser.parse_args()
    called = calls_of_a_step()
    hops: list[str] = []
    by_stage: dict[str, int] = {}
    for file, function in called:
        if function in STAGES:
            print(STAGES[function])
        stage = STAGES.get(function, next(reversed(by_stage), "Request"))
        if is_hop(file, function):
            hops.append(function)
            by_stage[stage] = by_stage.get(stage, 0) + 1
            print(f"{len(hops):6}  {file:<32}{function}")
        elif args.all:
            print(f"{'':8}{file:<32}{function}")
    print(f"\n{len(hops)} hops: " + ", ".join(f"{stage.lower()} {count}" for stage, count in by_stage.items()))
    print(f"{sum(not function.endswith(UNNAMED) for _, function in called)} functions of the package ran in the step")


if __name__ == "__main__":
    main()
