"""Profile one step of W1: where the GPU's time goes, as tables and as a picture.

    python benchmarks/profile_step.py --picture docs/images/w1_step.svg
    python benchmarks/profile_step.py --tiny            on a CPU, with PyTorch's operators instead of kernels

Runs the same command as `peers/ours.py` for three steps and records the kernels of the last one with PyTorch's
profiler, which slows the step down a little, so the seconds of the previous step are printed as well. Only kernels of
this process are seen, so vLLM must run in it (one engine, `--runtime local`). `timeline.py` computes and draws.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from peers.measurement import Task
from peers.ours import run_workload
from timeline import Span, kernel_profiler, picture, recorded_kernels, summary
from workload_files import write_files
from workloads import WORKLOADS, find_workload

PHASES = {"generation": "generation", "make_experience": "experience", "ppo_train": "training", "broadcast": "sync"}
STEPS = 3


class StepProfiler:
    """A sink that profiles the time between the logs of two steps."""

    def __init__(self) -> None:
        self.profiler = kernel_profiler()
        self.before = 0.0  # seconds of the step before the profiled one
        self.phases: list[Span] = []

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind != "train":
            return
        if step == STEPS - 1:
            self.before = values["timing/step_total"]
            self.profiler.start()
            self.began = time.perf_counter()
        elif step == STEPS:
            now = time.perf_counter() - self.began
            self.profiler.stop()
            for name, phase in reversed(PHASES.items()):  # the last phase has just ended
                seconds = values[f"timing/{name}"]
                self.phases.insert(0, Span(phase, max(0.0, now - seconds), now))
                now -= seconds

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=list(WORKLOADS), default="W1")
    parser.add_argument("--picture", type=Path, help="file for the timeline, as SVG")
    parser.add_argument("--memory", type=float, default=0.35, help="share of GPU memory for the engine")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="additional flags of train_ppo_ray")
    args = parser.parse_args()
    workload, recorder = find_workload(args.workload, tiny=args.tiny), StepProfiler()
    with tempfile.TemporaryDirectory() as folder:
        task = Task(workload, Path(folder), STEPS, args.tiny, args.memory, args.extra)
        write_files(task.folder, workload, STEPS)
        torch.cuda.empty_cache()
        run_workload(task, [recorder])
    kernels, seconds = recorded_kernels(recorder.profiler), recorder.phases[-1].end
    print(f"\n{workload.name}: {seconds:.2f} s with the profiler, {recorder.before:.2f} s the step before\n")
    print(summary(kernels, recorder.phases))
    if args.picture:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(
            picture(kernels, recorder.phases, f"One step of {workload.name}: what the GPU computes")
        )
        print(f"\nwrote {args.picture}")


if __name__ == "__main__":
    main()
