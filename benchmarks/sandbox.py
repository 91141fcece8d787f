"""Programs per second in the sandbox (openrlhf/agents/sandbox/program.py), one after another and with several workers.

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --runs 1000 --workers 1 2 4 --isolation bubblewrap

A program sorts a hundred numbers and prints them. `grading` is a test by `passes_test`, which runs two programs. `exec`
is a bare `python -c` without any isolation, for comparison. On a busy machine, the CPU time of a run is more reliable
than the clock; it covers this process and all that it started.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from openrlhf.agents.sandbox import program
from openrlhf.agents.sandbox.grading import passes_test

SOURCE = "import random\nrandom.seed(0)\nprint(sorted(random.random() for _ in range(100))[0])"
SOLUTION = "def add(a, b): return a + b"


def run_once() -> None:
    assert program.run_program(SOURCE).exit_code == 0


def grade_once() -> None:
    assert passes_test(SOLUTION, "assert add(1, 2) == 3")


def exec_once() -> None:
    subprocess.run([sys.executable, "-c", SOURCE], stdout=subprocess.DEVNULL, check=True)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(name: str, call: Callable[[], None], runs: int, workers: int) -> None:
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda _: call(), range(workers)))  # start the servers
        cpu_before = cpu_seconds()
        began = time.perf_counter()
        list(threads.map(lambda _: call(), range(runs)))
        seconds = time.perf_counter() - began
    program.close_servers()  # their CPU time is counted once they have ended
    cpu = (cpu_seconds() - cpu_before) / runs
    print(f"{name:12} {workers:3} workers {runs / seconds:8.0f} /s {1000 * cpu:8.1f} ms CPU each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--isolation", choices=["namespaces", "bubblewrap", "none"], help="default: the best on this machine"
    )
    args = parser.parse_args()
    if args.isolation:
        program._servers.isolation = args.isolation
    for workers in args.workers:
        measure("run_program", run_once, args.runs, workers)
    for workers in args.workers:
        measure("grading", grade_once, args.runs // 2, workers)
    measure("exec", exec_once, args.runs // 4, 1)


if __name__ == "__main__":
    main()
