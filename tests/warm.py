"""Python programs for tests as forks of a warm interpreter: importing torch and vLLM takes ten seconds, a fork none."""

import fcntl
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil

from tests.fork_server import KILL

SERVER = Path(__file__).with_name("fork_server.py")
IMPORTED = (
    "openrlhf.rl.train",
    "openrlhf.training.supervised",
    "openrlhf.cluster.actors",
    "deepspeed",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


@cache
def warm_python() -> tuple[str, ...]:
    """Words to put in place of `sys.executable`. Processes of the suite share one server, which the first starts."""
    address = f"{os.environ['WARM_FOLDER']}/socket"
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as runs on Ray have it; PyTorch reads it once
    environ = os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVER.parents[1])}
    with Path(f"{address}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(address).exists():
            words = [sys.executable, str(SERVER), "serve", address, os.environ["WARM_OWNER"], *IMPORTED]
            subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, check=True)
    return sys.executable, "-I", "-S", str(SERVER), "run", address


def warm_children() -> dict[str, str]:
    """An environment in which programs of ours start warm though others start them: launchers, Ray, shell scripts."""
    return {"WARM_PYTHON": warm_python()[-1], "PYTHONPATH": f"{SERVER.with_name('warm_start')}:{SERVER.parents[1]}"}


def warm_programs() -> list[psutil.Process]:
    """The programs that run, of all tests of the suite."""
    serving = ["serve", warm_python()[-1]]
    named = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[2:4] == serving]
    return min(named, key=psutil.Process.create_time).children()  # a program has its name until it takes another


def kill(client: int) -> None:
    """SIGKILL to the program behind a client, which ends when the program has: nothing is written after that."""
    os.kill(client, KILL)
