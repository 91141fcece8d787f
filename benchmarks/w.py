"""Compare this package with its peers on the workloads W1 to W4: one table, in Markdown.

    python benchmarks/w.py W1 W2 W3 W4 --peers                       ours and all peers that are installed
    python benchmarks/w.py W1 --peers trl upstream --upstream_folder ~/OpenRLHF
    python benchmarks/w.py W1 --extra --runtime ray --colocate_all_models
    python benchmarks/w.py W1 --tiny                                 a small shape on a CPU, to try the drivers

Each system runs in separate processes, one after the other, so that all of them have the whole machine
(`peers/`; `workloads.py` defines the workloads). A step is the median of all steps but the first, which compiles. A
peer that is not installed, fails or takes too long gets a line with the reason. Hosts differ, above all in the speed of
the processor, which limits vLLM: compare only figures from the same call.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peers.measurement import Measurement, find_measurement, typical
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
OURS = "ours"
PEERS = {"trl": "trl", "vllm": "vllm_alone", "upstream": "upstream"}  # name -> driver
LEFT_OUT = {  # (peer, workload) -> why there is nothing to run
    ("trl", "W3"): "TRL 1.16 has no PPO trainer",
    ("upstream", "W2"): "OpenRLHF gives all requests the same length",
}
COLUMNS = ("step, s", "generation, s", "training, s", "training tokens/s", "peak GiB", "step / ours")
ERROR_LENGTH = 200


@dataclass(frozen=True)
class Absent:
    """A peer without figures for a workload, and the reason."""

    who: str
    workload: str
    reason: str


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # `run` then ends the driver
    found: list[Measurement | Absent] = []
    with tempfile.TemporaryDirectory(prefix="w-") as temporary:
        for workload in args.workloads:
            folder = (args.folder or Path(temporary)).resolve() / ("tiny" if args.tiny else "full")
            common = [workload, "--folder", str(folder), "--steps", str(args.steps)]
            common += ["--tiny"] if args.tiny else []
            folder.mkdir(parents=True, exist_ok=True)
            files = [sys.executable, str(HERE / "workload_files.py"), *common]
            run(files, args.timeout, workload, "files", folder)
            for who in (OURS, *args.peers):
                result = measure(who, workload, common, folder, args)
                line = result.reason if isinstance(result, Absent) else f"{result.step:.2f} s a step"
                print(f"{workload}, {who}: {line}", file=sys.stderr, flush=True)
                found.append(result)
    print(render(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="default: none; without names: all of them")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.35, help="share of GPU memory for the engine")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each system and workload")
    parser.add_argument("--upstream_folder", type=Path, help="a clone of OpenRLHF")
    parser.add_argument("--folder", type=Path, help="folder for models and results (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--extra", nargs=argparse.REMAINDER, default=[], help="additional flags of train_ppo_ray, for ours"
    )
    args = parser.parse_args()
    args.peers = list(PEERS) if args.peers == [] else args.peers or []
    return args


def measure(
    who: str, workload: str, common: Sequence[str], folder: Path, args: argparse.Namespace
) -> Measurement | Absent:
    """Run the driver of one system on one workload."""
    if reason := LEFT_OUT.get((who, workload)):
        return Absent(who, workload, reason)
    command = [sys.executable, "-m", f"peers.{PEERS.get(who, who)}", *common, "--memory", str(args.memory)]
    command += ["--upstream_folder", str(args.upstream_folder.resolve())] if args.upstream_folder else []
    command += ["--extra", *args.extra] if who == OURS else []
    result = run(command, args.timeout, workload, who, folder)
    return result if isinstance(result, Absent) else find_measurement(result) or Absent(who, workload, "no figures")


def run(command: Sequence[str], timeout: float, workload: str, who: str, folder: Path) -> str | Absent:
    """Run a command with our repository on its path; return its output, or why there is none.

    Its standard error goes to a log in the folder, with the traceback if a peer failed.

    The command gets its own process group, all of which is killed at the end: engines and Ray would otherwise
    keep the GPU's memory from the next system.
    """
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        (folder / f"{workload}_{who}.log").open("w+") as errors,
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Absent(who, workload, f"not finished after {timeout:g} s (--timeout)")
        finally:
            stop_group(process.pid)
        if process.returncode == 0:
            return output
        errors.seek(0)
        return Absent(who, workload, last_error(errors.read()) or f"exit code {process.returncode}")


def stop_group(leader: int) -> None:
    """Kill a process and all that it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def last_error(text: str) -> str:
    """Return the last line that names an error, or else the last line, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "error"))]
    return (named or lines or [""])[-1][:ERROR_LENGTH]


def render(found: Sequence[Measurement | Absent]) -> str:
    """Return the table, with a line below it for each peer without figures."""
    ours = {item.workload: item for item in found if isinstance(item, Measurement) and item.who.startswith("openrlhf")}
    lines = ["| workload | who | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for item in found:
        if isinstance(item, Measurement):
            lines.append(f"| {item.workload} | {item.who} | " + " | ".join(cells(item, ours.get(item.workload))) + " |")
    notes = [f"{item.workload}, {item.who}: {item.reason}" for item in found if isinstance(item, Absent)]
    return "\n".join(lines + (["", *notes] if notes else []))


def cells(item: Measurement, ours: Measurement | None) -> list[str]:
    """Return the figures of a row; a peer that only generates is compared with our generation."""
    ratio = ""
    if ours is not None and item.training:
        ratio = f"{item.step / ours.step:.2f}"
    elif ours is not None:
        ratio = f"{item.step / typical(ours.generation):.2f} (generation)"
    return [
        f"{item.step:.2f}" if item.training else "",
        f"{typical(item.generation):.2f}",
        f"{typical(item.training):.2f}" if item.training else "",
        "" if item.tokens_per_second is None else f"{item.tokens_per_second:,.0f}",
        "" if item.peak_gib is None else f"{item.peak_gib:.1f}",
        ratio,
    ]


if __name__ == "__main__":
    main()
