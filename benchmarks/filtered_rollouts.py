"""Measure W2 with dynamic filtering, which half of the groups pass: compare rounds of groups with a stream of them.

    python benchmarks/filtered_rollouts.py                                 on a GPU
    python benchmarks/filtered_rollouts.py --ways stream async --steps 8
    python benchmarks/filtered_rollouts.py --tiny                          a small shape on a CPU, to try it

`rounds` starts groups only when all others have ended, and works on one rollout at a time, as this package did before
rollouts were streams. `stream` replaces a rejected group immediately. Both train synchronously. `async rounds` and
`async` do the same with --async_train; `async oversampled` also keeps another half a rollout of groups in progress.
Each way runs in a separate process. The Transformers engine of --tiny always generates in rounds.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from peers import ours
from peers.measurement import Task
from w import Absent, run
from workloads import find_workload

from openrlhf.rl.group_stream import GeneratedRollouts

ROUNDS, ASYNC = "rounds", "--async_train"
WAYS = {  # name -> flags
    ROUNDS: [],
    "stream": [],
    f"async {ROUNDS}": [ASYNC],
    "async": [ASYNC],
    "async oversampled": [ASYNC, "--vllm_generate_batch_size"],  # followed by OVERSAMPLING times the size of a rollout
}
OVERSAMPLING = 1.5
REWARD = """import zlib


def reward_func(queries, prompts, labels):
    passes = zlib.crc32(prompts[0].encode()) % 1000 < 1000 * {pass_rate}
    rewards = [float(passes and number % 2) for number in range(len(queries))]
    return {{"rewards": rewards, "scores": rewards}}
"""
COLUMNS = {  # title -> metric
    "step, s": "timing/step_total",
    "generation, s": "timing/generation",
    "training, s": "timing/ppo_train",
    "wait for samples, s": "timing/trainer_wait",
    "engines busy": "timing/engines_busy",
    "groups that pass, %": "dynamic_filtering_pass_rate",
    "response, tokens": "response_length",
    "age, updates": "staleness_mean",
}


def main() -> None:
    args = parse()
    if args.driver is not None:
        drive(args)
        return
    print("| way | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="filtered-") as temporary:
        folder = str(args.folder or temporary)
        Path(folder).mkdir(parents=True, exist_ok=True)
        common = ["--folder", folder, *(["--tiny"] if args.tiny else [])]
        steps = str(round(3 * args.steps / args.pass_rate))  # more prompts than steps need: some are rejected
        files = [sys.executable, str(Path(__file__).with_name("workload_files.py")), "W2", "--steps", steps]
        made = run([*files, *common], args.timeout, "W2", "files", Path(folder))
        if isinstance(made, Absent):
            raise SystemExit(made.reason)
        (Path(folder) / "reward.py").write_text(REWARD.format(pass_rate=args.pass_rate))
        for way in args.ways:
            own = [sys.executable, __file__, "--driver", way, *common, "--steps", str(args.steps)]
            own += ["--memory", str(args.memory), "--extra", *args.extra]
            output = run(own, args.timeout, "W2", way.replace(" ", "_"), Path(folder))
            print(f"{way}: {output.reason}" if isinstance(output, Absent) else output.splitlines()[-1], flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--pass_rate", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=5, help="number of steps; the first does not count")
    parser.add_argument("--memory", type=float, default=0.35, help="share of GPU memory for the engine")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each way")
    parser.add_argument("--folder", type=Path, help="folder for models and results (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--driver", choices=list(WAYS), help=argparse.SUPPRESS)  # run this one of WAYS in this process
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="all further words: more training flags")
    return parser.parse_args()


def drive(args: argparse.Namespace) -> None:
    """Run one of WAYS in this process, and print its row of the table."""
    if ROUNDS in args.driver:
        generate_in_rounds()
    run_dir = args.folder / args.driver.replace(" ", "_")
    workload = find_workload("W2", tiny=args.tiny)
    extra = [*way_flags(args.driver, workload.prompts, run_dir), *args.extra]
    ours.run_workload(Task(workload, args.folder, args.steps, args.tiny, args.memory, extra))

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"][1:]
    means = [fmean(step.get(name, 0.0) for step in steps) for name in COLUMNS.values()]
    print(f"\n| {args.driver} | " + " | ".join(f"{value:.2f}" for value in means) + " |", flush=True)


def way_flags(way: str, prompts: int, run_dir: Path) -> list[str]:
    """Return the flags in which a way differs from W2; `prompts` is the number of groups in a rollout."""
    flags = ["--dynamic_filtering", *WAYS[way]]
    if flags[-1] == "--vllm_generate_batch_size":
        flags.append(str(round(OVERSAMPLING * prompts)))
    return [
        *flags,
        "--run_dir",
        str(run_dir),
        "--ckpt_path",
        f"{run_dir}_checkpoints",
        "--save_path",
        f"{run_dir}_model",
    ]


def generate_in_rounds() -> None:
    """Switch the stream off: groups start when no others run, and a rollout when the previous one is complete."""
    create = GeneratedRollouts.__init__

    def create_in_rounds(source: GeneratedRollouts, *arguments: Any) -> None:
        create(source, *arguments)
        source.in_rounds = True

    GeneratedRollouts.__init__ = create_in_rounds


if __name__ == "__main__":
    main()
