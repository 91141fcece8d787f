"""Generation with 1, 2, ... engine processes on one GPU: which number is fastest, and where the time goes.

    python benchmarks/engines_per_gpu.py W1 --engines 4
    python benchmarks/engines_per_gpu.py W1 --engines 2 --tiny        a small shape on a CPU, to try the script

Starts the engines once, as a local run does (under CUDA MPS on a GPU), and then generates the rollout of the workload
with the first of them, the first two, and so on. Unused engines only hold memory. Engines share `--memory` equally, so
give them enough for one engine to hold all sequences. Engines use the weights on disk, and nothing is trained.

It prints the seconds until each engine was ready. Then, for each number of engines, it prints the seconds of a rollout
after a warm-up, and the milliseconds of a step of the slowest engine.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from peers.measurement import PeakMemory, Task
from peers.ours import flags
from transformers import AutoTokenizer
from workload_files import read_prompts
from workloads import WORKLOADS, Workload, find_workload

from openrlhf.api.start import prepare
from openrlhf.config.commands import RLConfig
from openrlhf.rl.engines import engine_spec, load_engine
from openrlhf.rl.local_engines import cpu_share, gpu_share, has_gpu
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.rollout.engine_group import EngineGroup
from openrlhf.rollout.engine_process import open_engine_processes
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm import VLLMEngine, preload
from openrlhf.types import Request, SamplingParams

STEPS_FILE = "steps_{number}.txt"  # file of an engine: seconds of each step, one per line
WRITING_SECONDS = 5.0  # seconds for an engine to write the file


@dataclass
class StepClock:
    """Notes the seconds of an engine's steps, and appends them to a file when no request is left."""

    engine: VLLMEngine
    path: Path
    seconds: list[float] = field(default_factory=list)

    def install(self) -> None:
        plain = self.engine._step

        def step() -> None:
            start = time.perf_counter()
            plain()
            self.seconds.append(time.perf_counter() - start)
            if not self.engine._running:
                with self.path.open("a") as file:
                    file.write("".join(f"{seconds}\n" for seconds in self.seconds))
                self.seconds.clear()

        self.engine._step = step  # pyrefly: ignore[bad-assignment]


def load_timed(spec: EngineSpec, number: int, folder: str, began: float) -> LoadingEngine:
    """Build an engine in its process, with a clock."""
    start = time.time()
    engine = load_engine(spec, number, folder)
    assert isinstance(engine, VLLMEngine)
    StepClock(engine, Path(folder) / STEPS_FILE.format(number=number)).install()
    now = time.time()
    print(
        f"engine {number}: built in {now - start:.1f} s, ready after {now - began:.1f} s", file=sys.stderr, flush=True
    )
    return engine


def make_requests(workload: Workload, folder: Path) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in read_prompts(folder)[: workload.prompts]]
    return [
        Request(
            prompts[place // workload.samples], SamplingParams(length, min_tokens=length), place // workload.samples
        )
        for place, length in enumerate(workload.lengths)
    ]


async def measure(config: RLConfig, workload: Workload, folder: Path, args: argparse.Namespace) -> None:
    spec, requests = engine_spec(config).divided(args.engines), make_requests(workload, folder)
    paths = [folder / STEPS_FILE.format(number=number) for number in range(args.engines)]
    began = time.time()
    share = gpu_share(args.engines) if has_gpu(config) else cpu_share(args.engines, {})
    async with open_engine_processes(
        args.engines,
        lambda number: partial(load_timed, replace(spec, seed=number), number, str(folder), began),
        environment={**share, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=config.engines.engine_timeout,
        max_restarts=0,
        in_turn=has_gpu(config),
        preload=preload,
        awaits_weights=False,
    ) as group:
        print(f"{args.engines} engines started in {time.time() - began:.1f} s\n", flush=True)
        print(
            "| engines | seconds of a rollout | tokens/s | steps | ms a step | 95th percentile |\n" + "|---" * 6 + "|"
        )
        for count in args.counts or range(1, args.engines + 1):
            some = EngineGroup(group.engines[:count], group.start, 0)
            times = []
            for _ in range(1 + args.repeats):
                some.forget_caches()
                for path in paths:
                    path.unlink(missing_ok=True)
                start = time.perf_counter()
                made = await some.generate(requests)
                times.append(time.perf_counter() - start)
            tokens = sum(len(completion.token_ids) for completion in made)
            assert tokens == sum(workload.lengths), f"{tokens} tokens: expected {sum(workload.lengths)}"
            steps = [await read_steps(path) for path in paths[:count]]
            slowest = max(steps, key=sum)
            seconds, ms = statistics.median(times[1:]), 1000 * sum(slowest) / len(slowest)
            cells = [
                str(count),
                f"{seconds:.2f} ({', '.join(f'{value:.2f}' for value in times)})",
                f"{tokens / seconds:,.0f}",
                str(len(slowest)),
                f"{ms:.2f}",
                f"{1000 * statistics.quantiles(slowest, n=20)[-1]:.2f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


async def read_steps(path: Path) -> list[float]:
    """Return the seconds of an engine's steps, which it writes right after it has answered the last request."""
    deadline = time.monotonic() + WRITING_SECONDS
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return [float(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--engines", type=int, default=4, help="processes to start")
    parser.add_argument("--counts", type=int, nargs="*", help="numbers to measure (default: all up to --engines)")
    parser.add_argument("--repeats", type=int, default=2, help="rollouts after the first, with each number of engines")
    parser.add_argument("--memory", type=float, default=0.5, help="share of GPU memory for all engines")
    parser.add_argument("--folder", type=Path, help="folder for the model (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    workload, peak = find_workload(args.workload, tiny=args.tiny), PeakMemory()
    with tempfile.TemporaryDirectory() as temporary, peak.watch():
        folder = (args.folder or Path(temporary)).resolve()
        files = [sys.executable, str(Path(__file__).with_name("workload_files.py")), args.workload, "--steps", "1"]
        files += ["--folder", str(folder), *(["--tiny"] if args.tiny else [])]
        subprocess.run(files, check=True)  # in a separate process, which then frees the GPU
        task = Task(workload, folder, 1, args.tiny, args.memory, ["--vllm_num_engines", "1"])
        asyncio.run(measure(prepare("train_ppo_ray", flags(task)), workload, folder, args))
    if peak.gib is not None:
        print(f"\npeak {peak.gib:.1f} GiB")


if __name__ == "__main__":
    from engines_per_gpu import main as run  # engines find `load_timed` in this module, not in __main__

    run()
