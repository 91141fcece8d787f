"""Run benchmarks one after the other on a machine with a GPU, and summarise what they print.

    python benchmarks/battery.py --out results                        all of them: up to four hours
    python benchmarks/battery.py sft w1 --out results --seconds 900   some of them, with a time limit
    python benchmarks/battery.py --tiny --out results                 at tiny scale on a CPU, to try them

BENCHMARKS below lists the names. Each runs in its own session with a time limit. Then all processes that it started are
killed, and the next one starts once the GPU is as empty as before. The folder gets the whole output of each in
NAME.log, and summary.md: outcome, seconds, the peak memory of the first GPU and of the host (all processes), and the
lines that matter.
"""

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from peers.measurement import PeakMemory, highest
from w import HERE, last_error

from openrlhf.agents.sandbox.descendants import adopt_orphans, kill_descendants

LEAST_SECONDS = 30.0  # do not start a benchmark with fewer seconds left
READING_SECONDS = 0.5  # seconds between two readings of the host's memory
EMPTYING_SECONDS = 60.0  # seconds for the GPU's driver to free the memory of killed processes
SPARE_GIB = 1.0  # GiB in use above the level before that still count as empty
PACKAGES = ("torch", "transformers", "vllm", "trl")
LAST_LINES, LINE_LENGTH = 12, 300  # lines of a failed benchmark; characters of a line in the summary


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder with its arguments, in which OUT stands for the folder of the results."""

    script: str
    arguments: str = ""
    tiny: str | None = None  # arguments for a CPU; None if it needs a GPU
    seconds: int = 300  # limit
    show: str = r"^\|"  # pattern of the lines for the summary; by default, lines of a table

    def command(self, out: Path, *, tiny: bool) -> list[str]:
        given = self.tiny if tiny else self.arguments
        assert given is not None, f"{self.script} needs a GPU"
        words = [word.replace("OUT", str(out)) for word in shlex.split(given)]
        return [sys.executable, str(HERE / self.script), *words]


SHAPE = "--device cpu --hidden 64 --layers 2 --vocab 1000"
SFT, SFT_TINY, SFT_LINES = "train_throughput.py", f"{SHAPE} --tokens 512 --row 128", "tokens/s|^MFU|^peak|compil"
PEERS = r"^\||^W\d, "
STEPS = r"^ +(\d|step)|^median|^neither|^mean sample|^vLLM's own|(cannot|does not) fit|engines (share|take turns)"
TRY = "--tiny --steps 2"

BENCHMARKS = {
    # Training, without vLLM
    "sft": Benchmark(SFT, "--compile --kernels 12", SFT_TINY, show=rf"{SFT_LINES}|^\|"),
    "sft_auto": Benchmark(SFT, "--compile auto", f"--compile auto {SFT_TINY}", show=SFT_LINES),
    "sft_fsdp": Benchmark(SFT, "--compile --backend fsdp", f"--backend fsdp {SFT_TINY}", show=SFT_LINES),
    "adam_offload": Benchmark("adam_offload.py", "", SFT_TINY, show="."),
    "head": Benchmark("head_memory.py", "", "--device cpu --tokens 256 --hidden 64 --vocab 1000", show="full|ours"),
    "shared_prompts": Benchmark(
        "shared_prefixes.py", "--compile --prompt 2048 --groups 2", f"{SHAPE} --prompt 32 --response 16", show="."
    ),
    "ring": Benchmark("ring_attention.py", "", "--device cpu --tokens 1024", show="."),
    # Generation
    "transformers_engine": Benchmark(
        "engine.py",
        "--hidden 1536 --layers 28 --key_heads 2 --vocabulary 151936 --dtype bfloat16 --requests 512 --rows 512"
        " --longest_prompt 128 --longest_response 96 --rollout",
        "--hidden 64 --layers 2 --key_heads 1 --requests 8 --rows 8 --longest_response 16 --rollout",
        show="engine|ms a step|peak",
    ),
    "engines_per_gpu": Benchmark("engines_per_gpu.py", "W1", "W1 --engines 2 --repeats 1 --tiny", 400, r"^\||started"),
    "adapters": Benchmark("native_adapters.py", "", "--tiny", 400, "^merging|: seconds"),
    # Reinforcement learning
    "w1": Benchmark("w.py", "W1 --peers", f"W1 {TRY}", 1200, PEERS),
    "w2": Benchmark("w.py", "W2 --peers", f"W2 {TRY}", 1200, PEERS),
    "w2_async": Benchmark("w.py", "W2 --extra --async_train", f"W2 {TRY} --extra --async_train", 600, PEERS),
    "w3": Benchmark("w.py", "W3 --peers", f"W3 {TRY}", 900, PEERS),
    "w4": Benchmark("w.py", "W4 --peers", f"W4 {TRY}", 1200, PEERS),
    "filtered": Benchmark(
        "filtered_rollouts.py",
        "--ways rounds stream async",
        "--tiny --ways stream --steps 2",
        1200,
        r"^\||^(rounds|stream|async)",
    ),
    "step_ray": Benchmark("rl_step.py", "--runtime ray", f"{TRY} --runtime ray", 600, STEPS),
    "lora_7b": Benchmark(
        "rl_step.py",
        "--shape 7b --steps 3 --memory 0.2 --skip_alone --engines_per_gpu 1 -- --lora_rank 32",
        f"{TRY} --skip_alone -- --lora_rank 4",
        900,
        STEPS,
    ),
    "full_7b": Benchmark(
        "rl_step.py",
        "--shape 7b --steps 3 --memory 0.2 --skip_alone --engines_per_gpu 1"
        " -- --gradient_checkpointing --deepcompile false --vllm_enable_sleep --disable_ds_ckpt",
        f"{TRY} --skip_alone -- --gradient_checkpointing",
        900,
        STEPS,
    ),
    "profile": Benchmark(
        "profile_step.py", "--picture OUT/w1_step.svg --extra --vllm_engines_per_gpu 1", "--tiny", 400, r"^\||^W\d: "
    ),
    # Mixtures of experts, layouts of weights, and kernels
    "router_replay": Benchmark("router_replay.py", "", TRY, 600, r"router_replay|engine_kl|e[+-]\d\d |^failed"),
    "weight_channel": Benchmark("weight_channel.py", "", "--parameters 1000000", show="."),
    "weight_sync": Benchmark("weight_sync.py", "mixtral qwen3_moe qwen2", seconds=900, show="."),
    "liger": Benchmark("liger.py", seconds=600, show="."),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a benchmark."""

    name: str
    command: str
    problem: str  # empty if it succeeded
    seconds: float
    gpu_gib: float | None  # peak GiB; None without a GPU
    host_gib: float
    lines: list[str]


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # `measure` then kills the benchmark
    args.out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    until, empty, header = time.monotonic() + args.seconds, gpu_gib(), describe_machine()
    outcomes: list[Outcome] = []
    for name in args.names:
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            outcomes.append(Outcome(name, "", f"not started: {left:.0f} s left", 0.0, None, 0.0, []))
        else:
            command = BENCHMARKS[name].command(args.out, tiny=args.tiny)
            limit, show = min(BENCHMARKS[name].seconds, left), re.compile(BENCHMARKS[name].show)
            print(f"{name}, at most {limit:.0f} s: {shlex.join(command)}", file=sys.stderr, flush=True)
            outcomes.append(measure(name, command, limit, show, args.out / f"{name}.log"))
            wait_for_empty_gpu(empty)
        (args.out / "summary.md").write_text(f"{header}\n\n{render(outcomes)}\n")
    print((args.out / "summary.md").read_text(), end="")
    sys.exit(any(outcome.problem for outcome in outcomes))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the logs and the summary")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit for all of them, in seconds")
    parser.add_argument("--tiny", action="store_true", help="run those that work on a CPU, at tiny scale")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark has the name {unknown[0]}: expected {', '.join(BENCHMARKS)}")
    fitting = [name for name, benchmark in BENCHMARKS.items() if benchmark.tiny is not None or not args.tiny]
    if large := [name for name in args.names if name not in fitting]:
        parser.error(f"{large[0]} needs a GPU: expected names without it, or no --tiny")
    args.names, args.out = args.names or fitting, args.out.resolve()
    return args


def measure(name: str, command: list[str], limit: float, show: re.Pattern[str], log: Path) -> Outcome:
    """Run a command with our repository on its path, and kill all that it leaves behind."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    peak, began = PeakMemory(), time.monotonic()
    try:
        with log.open("w") as output, peak.watch():
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            host = wait(process, limit)
        code = process.poll()
    finally:
        kill_descendants()
    lines = [line.rstrip()[:LINE_LENGTH] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    kept = [line for line in lines if show.search(line)]
    problem = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}" if code else ""
    if code:
        problem += f", {last_error(log.read_text(errors='replace'))}"
    kept += ["last lines:", *lines[-LAST_LINES:]] if problem else []
    shown = shlex.join(command).replace(f"{sys.executable} {HERE}/", "python benchmarks/")
    return Outcome(name, shown, problem, time.monotonic() - began, peak.gib, host, kept)


def wait(process: subprocess.Popen[bytes], limit: float) -> float:
    """Wait until a process ends or time is up; return the peak GiB of host memory in use."""
    peak, deadline = 0.0, time.monotonic() + limit
    while (left := deadline - time.monotonic()) > 0:
        peak = max(peak, host_gib())
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(READING_SECONDS, left))
            break
    return peak


def host_gib() -> float:
    """Return the GiB of host memory that are in use, without caches of files."""
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return (int(found["MemTotal"]) - int(found["MemAvailable"])) / 2**20


def nvidia_smi(query: str) -> str:
    """Return nvidia-smi's answer for the first GPU; empty without nvidia-smi."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_gib() -> float:
    """Return the GiB in use on the first GPU."""
    return highest(nvidia_smi("memory.used")) or 0.0


def wait_for_empty_gpu(before: float) -> None:
    """Wait until the driver has freed the memory of killed processes."""
    deadline = time.monotonic() + EMPTYING_SECONDS
    while gpu_gib() > before + SPARE_GIB and time.monotonic() < deadline:
        time.sleep(READING_SECONDS)
    if (used := gpu_gib()) > before + SPARE_GIB:
        print(f"{used:.1f} GiB of the GPU are in use, {before:.1f} before", file=sys.stderr, flush=True)


def describe_machine() -> str:
    """Return the GPU, the cores and the versions of packages."""
    gpu = nvidia_smi("name,driver_version") or "no GPU"
    installed = {one.name: one.version for one in distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([gpu, f"{cores} cores", f"Python {platform.python_version()}", *versions])


def render(outcomes: Iterable[Outcome]) -> str:
    """Return the summary in Markdown: a table of all benchmarks, then the lines of each."""
    found = list(outcomes)
    lines = ["| benchmark | outcome | seconds | GPU peak, GiB | host peak, GiB |", "|---" * 5 + "|"]
    for item in found:
        gpu = "" if item.gpu_gib is None else f"{item.gpu_gib:.1f}"
        host = f"{item.host_gib:.1f}" if item.command else ""
        problem = item.problem.replace("|", "\\|")
        lines.append(f"| {item.name} | {problem or 'ok'} | {item.seconds:.0f} | {gpu} | {host} |")
    for item in found:
        if item.command:
            lines += ["", f"## {item.name}", "", "```", item.command, "", *item.lines, "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
