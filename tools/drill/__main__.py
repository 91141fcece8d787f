"""Run the drills and print what was tried, what survived and what was lost; exit with 1 if anything was lost.

python -m tools.drill                                  # make drill: everything, in about ten minutes on two cores
python -m tools.drill --drills local bad --local 10    # some drills, with fewer kills
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.drill.outcome import Outcome, render_table

SETTINGS = ("RAY_", "WANDB_", "VLLM_", "OPENRLHF_", "SLURM_", "TORCHELASTIC_")  # variables that would change runs
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "## Results\n", "## What each drill checks\n"
SHOWN = 20  # maximum losses to print per drill
COUNTS = ("local", "deepspeed", "ray", "damage", "bad", "prompts", "steps")


def local_kills(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.local_kills import drill_local_kills

    return drill_local_kills(folder, flags.local, flags.seed, flags.at_a_time)


def damaged_checkpoints(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.damage import drill_damage

    return drill_damage(folder, flags.seed, flags.damage, at_a_time=flags.at_a_time)


def bad_disks(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.damage import drill_disks

    return drill_disks(folder, flags.at_a_time)


def bad_inputs(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.bad_inputs import drill_bad_inputs

    return drill_bad_inputs(folder, flags.seed, flags.bad, flags.at_a_time)


def launched_kills(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.launched_kills import drill_launched_kills

    return drill_launched_kills(folder, flags.deepspeed, flags.seed)


def ray_kills(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.ray_kills import drill_ray_kills

    return drill_ray_kills(folder, flags.ray, flags.seed)


def many_prompts(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.long_runs import drill_many_prompts

    return drill_many_prompts(folder, flags.prompts, flags.seed)


def many_steps(folder: Path, flags: argparse.Namespace) -> Outcome:
    from tools.drill.long_runs import drill_many_steps

    return drill_many_steps(folder, flags.steps)


DRILLS: dict[str, tuple[str, Callable[[Path, argparse.Namespace], Outcome]]] = {
    "local": ("kills of RL in one process, sync and async", local_kills),
    "deepspeed": ("kills of SFT on two DeepSpeed ranks: ranks, launcher", launched_kills),
    "ray": ("kills on Ray with vLLM: driver, rank, engine, reward worker, head", ray_kills),
    "damage": ("truncated, bit-flipped, missing and emptied checkpoint files", damaged_checkpoints),
    "disks": ("disks that are full or read-only", bad_disks),
    "bad": ("bad command lines, files, rows, models and rewards", bad_inputs),
    "prompts": ("prompts of async RL, of which 5% have a failing reward", many_prompts),
    "steps": ("steps of RL with rotation, evaluation and 4 restarts", many_steps),
}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drill", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drills", nargs="+", choices=DRILLS, default=list(DRILLS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random times and kinds of damage (default: 0)")
    parser.add_argument("--local", type=int, default=70, help="kills of runs in one process (default: 70)")
    parser.add_argument("--deepspeed", type=int, default=15, help="kills of two ranks (default: 15)")
    parser.add_argument("--ray", type=int, default=15, help="kills of runs on Ray (default: 15)")
    parser.add_argument("--damage", type=int, help="damaged checkpoints (default: each file in each way)")
    parser.add_argument("--bad", type=int, help="bad inputs (default: all)")
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts of the long run (default: 10,000)")
    parser.add_argument("--steps", type=int, default=2_000, help="steps of the run with restarts (default: 2,000)")
    parser.add_argument("--at_a_time", type=int, default=2, help="small runs at the same time (default: 2)")
    parser.add_argument("--write", action="store_true", help="write the table to docs/reliability.md")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all runs")
    return parser.parse_args()


def run_drills(root: Path, flags: argparse.Namespace) -> list[tuple[str, Outcome, float]]:
    """Run the chosen drills in separate folders; return title, outcome and seconds of each."""
    from tools.drill.programs import end_all

    rows: list[tuple[str, Outcome, float]] = []
    for name in flags.drills:
        title, drill = DRILLS[name]
        begun = time.monotonic()
        (root / name).mkdir()
        try:
            outcome = drill(root / name, flags)
        finally:
            end_all(root / name)
        rows.append((title, outcome, time.monotonic() - begun))
        print(f"{name}: {outcome.survived} of {outcome.tried} survived", flush=True)
        for loss in outcome.losses[:SHOWN]:
            print(f"  lost: {loss}", flush=True)
        if outcome.lost > SHOWN:
            print(f"  and {outcome.lost - SHOWN} more", flush=True)
    return rows


def end_runs_on_signals(root: Path) -> None:
    """Kill all runs when the drill itself is stopped; threads that wait for runs would not notice otherwise."""
    from tools.drill.programs import end_all

    def end(number: int, frame: object) -> None:
        end_all(root)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def describe(flags: argparse.Namespace) -> str:
    """Return the flags that repeat these drills."""
    counts = [f"--{name} {getattr(flags, name)}" for name in COUNTS if getattr(flags, name) is not None]
    return " ".join([f"--seed {flags.seed} --drills", *flags.drills, *counts])


def write_results(results: str) -> None:
    """Replace the results in docs/reliability.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{results}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    flags = parse_flags()
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        del os.environ[name]
    root = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))  # short, because socket paths of Ray are limited in length
    os.environ |= {"WARM_OWNER": str(os.getpid()), "WARM_FOLDER": str(root), "TOKENIZERS_PARALLELISM": "false"}
    print(f"drills: {' '.join(flags.drills)}, seed {flags.seed}, in {root}", flush=True)
    end_runs_on_signals(root)
    rows = run_drills(root, flags)
    lost = sum(outcome.lost for _, outcome, _ in rows)
    results = (
        f"{render_table(rows)}\n\nSeed {flags.seed}, {os.cpu_count()} cores: `python -m tools.drill {describe(flags)}`."
    )
    print(f"\n{results}")
    if flags.write:
        write_results(results)
    if not flags.keep and not lost:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
