"""Run our commands in tests: in the test's own process, as a process, or as two ranks; and read what they wrote.

`run_command` is the default: it calls the command's `main` directly, so errors and coverage stay in the test. Use
`start_command` if the test sends signals, and `start_two_ranks` or `torchrun` for several ranks.
These processes start warm, see tests.warm.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil

from tests.metric_tables import find_metric
from tests.warm import warm_python

ROOT = Path(__file__).parents[1]  # of the repository
_ports: set[str] = set()  # given out by free_port
DEADLINE = 600  # seconds; only a hanging run takes this long
FAST = {  # flags that suit a tiny model
    "train_batch_size": 16,
    "micro_train_batch_size": 8,
    "max_epochs": 1,
    "learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "lr_scheduler": "constant",
}


def as_argv(flags):
    """{"bf16": True, "reward_tokens": ["+", "-"]} as words of a command line; the name "" has positional arguments."""
    argv = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        argv += [] if value is None else [*([f"--{name}"] if name else []), *map(str, values)]
    return argv


def command_environ(**more):
    """The environment of a process that runs our code from this checkout, on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def run_command(command, flags):
    """Run the command in this process, as its module would."""
    import_module(f"openrlhf.cli.{command}").main(as_argv(flags))


def start_command(folder, command, flags):
    """Start the command as a process; its standard error goes to stderr.txt in the folder."""
    words = [*warm_python(), "-m", f"openrlhf.cli.{command}", *as_argv(flags)]
    with (folder / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(words, cwd=folder, stderr=stderr, env=command_environ())


def torchrun(ranks):
    """Return the words that start `python ...` in this many processes of this machine, each of them warm."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", free_port()]
    return [sys.executable, *launcher, "--no-python", *warm_python()]


def run_processes(words):
    """Run a launcher in the repository until its processes end; fail with their output if one fails."""
    environ = command_environ(DS_ACCELERATOR="cpu", PYTHONFAULTHANDLER="1")
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-15000:]


def start_two_ranks(folder, *words):
    """Start `python WORDS` twice under torchrun; all output is appended to output.txt in the folder."""
    return start_ranks(2, folder, *words)


def start_ranks(ranks, folder, *words):
    """Start `python WORDS` as often as there are ranks, like `start_two_ranks`."""
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [*torchrun(ranks), *words],
            cwd=folder,
            stdout=output,
            stderr=output,
            env=command_environ(),
            start_new_session=True,
        )


def wait_until(process, happened):
    """Wait until `happened()` is true; fail if the process ends before that."""
    for _ in range(DEADLINE * 200):
        if happened():
            return
        try:
            code = process.wait(timeout=0.005)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the run ended too early, with exit code {code}")
    process.kill()
    raise AssertionError(f"nothing happened for {DEADLINE} seconds")


def free_port():
    """Return a TCP port that is free now, as text; never the same one twice."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        if port not in _ports:
            _ports.add(port)
            return port


def unlisted_metrics(command, run_dir, extra_logs=()):
    """Return the names in a run's metrics.jsonl that docs/metrics.md does not explain."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {"kind", "step", *extra_logs}
    found = {(line["kind"], name) for line in lines for name in line.keys() - known}
    return sorted(name for kind, name in found if find_metric(kind, name, command) is None)


@dataclass(frozen=True)
class FinishedRun:
    """The files that a command wrote."""

    save_path: Path
    ckpt_path: Path

    @property
    def metrics(self):
        """The lines of metrics.jsonl without timings, which differ between any two runs."""
        lines = (self.save_path / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{name: value for name, value in row.items() if not name.startswith("timing/")} for row in rows]

    def train(self, name):
        """Return this metric at each logged training step."""
        return [line[name] for line in self.metrics if line["kind"] == "train"]

    def evaluation(self, name):
        """Return this metric at each evaluation."""
        return [line[name] for line in self.metrics if line["kind"] == "eval"]

    @property
    def config(self):
        """The config.json of the saved model."""
        return json.loads((self.save_path / "config.json").read_text())


def is_running(pid):
    """Return whether a process exists and is not a zombie, which nothing may collect in a container."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
