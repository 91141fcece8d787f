"""The measurement of a driver, the line of JSON that reports it, and the arguments that all drivers take.

Drivers print other lines too (progress, warnings of libraries), so `w.py` takes the last line that is a measurement.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workloads import WORKLOADS, Workload, find_workload

MEMORY_INTERVAL = 250  # milliseconds between two readings of nvidia-smi


@dataclass(frozen=True)
class Measurement:
    """Seconds of each step of a workload, the first of which compiles and warms up."""

    who: str  # name and version
    workload: str
    steps: list[float]  # seconds of each step
    generation: list[float]  # seconds of generation in each step, perhaps including rewards
    training: list[float]  # seconds of training (passes and updates) in each step; empty if nothing is trained
    tokens_per_second: float | None  # tokens trained on, with prompts, per second of training
    peak_gib: float | None  # peak memory of all processes on the GPU; None without a GPU

    @property
    def step(self) -> float:
        return typical(self.steps)


@dataclass(frozen=True)
class Task:
    """The task of a driver."""

    workload: Workload
    folder: Path  # contains the files of `workload_files.py`
    steps: int
    tiny: bool  # small enough for a CPU
    memory: float  # share of the GPU's memory for the engine
    extra: list[str]  # additional flags of train_ppo_ray, for ours
    upstream: Path | None = None  # folder of a clone of OpenRLHF

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def check_responses(self, tokens: int) -> None:
        """Exit if the number of response tokens differs from the workload's."""
        expected = sum(self.workload.lengths)
        if tokens != expected:
            raise SystemExit(f"the responses have {tokens} tokens: expected {expected}")

    def measured(
        self,
        who: str,
        steps: Sequence[float],
        generation: Sequence[float],
        training: Sequence[float] = (),
        peak_gib: float | None = None,
    ) -> Measurement:
        rate = self.workload.tokens / typical(training) if training else None
        return Measurement(who, self.workload.name, list(steps), list(generation), list(training), rate, peak_gib)


def typical(seconds: Sequence[float]) -> float:
    """Return the median without the first step, or the first step if it is the only one."""
    return statistics.median(seconds[1:] or seconds)


def read_task() -> Task:
    """Read the arguments of a driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.35)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--upstream_folder", type=Path)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    workload = find_workload(args.workload, tiny=args.tiny)
    return Task(workload, args.folder, args.steps, args.tiny, args.memory, args.extra, args.upstream_folder)


def report(measurement: Measurement) -> None:
    """Print the line that `find_measurement` finds."""
    print("\n" + json.dumps(asdict(measurement)), flush=True)


def find_measurement(output: str) -> Measurement | None:
    """Return the last measurement in a driver's output, or None."""
    names = {field.name for field in fields(Measurement)}
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and found.keys() == names:
            return Measurement(**found)
    return None


def version_of(package: str) -> str:
    """Return the version of an installed package; a folder on PYTHONPATH has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "from its folder"


class PeakMemory:
    """Reads the memory in use on the first GPU while a driver runs.

    nvidia-smi sees all processes and allocators, so the figure means the same for every system.
    """

    gib: float | None = None  # known at the end; None without a GPU

    @contextmanager
    def watch(self) -> Iterator[None]:
        tool = shutil.which("nvidia-smi")
        if tool is None:
            yield
            return
        query = ["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"-lms={MEMORY_INTERVAL}"]
        with tempfile.TemporaryFile("w+") as readings:
            process = subprocess.Popen([tool, *query], stdout=readings, stderr=subprocess.DEVNULL)
            try:
                yield
            finally:
                process.kill()
                process.wait()
            readings.seek(0)
            self.gib = highest(readings.read())


def highest(readings: str) -> float | None:
    """Return the highest reading of nvidia-smi, in GiB; its numbers are MiB, one per line."""
    numbers = [int(line) for line in readings.splitlines() if line.strip().isdigit()]
    return max(numbers) / 1024 if numbers else None
