"""Start the suite's Python programs warm: as forks of an interpreter with torch and vLLM imported (fork_server.py).

Three ways to start a program, and which to use:

- `[*warm_python(), "-m", "openrlhf.cli.train_sft", ...]` in place of `[sys.executable, ...]`: the program starts in
  milliseconds. The default for tests that start a command.
- `env=os.environ | warm_children()` for programs that something else starts: launchers, Ray and shell scripts. Python
  imports `warm_start/sitecustomize.py` first, which replaces the programs listed there by a client of the server.
- `sys.executable` directly, cold: for tests of imports, process trees and terminals.

All worker processes of one pytest run share one server. The first call of `warm_python` starts it; it ends with pytest
(WARM_OWNER and WARM_FOLDER, set in conftest.py).
"""

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
    """Return the words to use in place of `sys.executable`; start the server if it is not running yet."""
    address = f"{os.environ['WARM_FOLDER']}/socket"
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as in runs on Ray; PyTorch reads it only once, at import
    environ = os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVER.parents[1])}
    with Path(f"{address}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(address).exists():
            words = [sys.executable, str(SERVER), "serve", address, os.environ["WARM_OWNER"], *IMPORTED]
            subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, check=True)
    return sys.executable, "-I", "-S", str(SERVER), "run", address


def warm_children() -> dict[str, str]:
    """Return variables with which launchers, Ray and shell scripts start our programs warm."""
    return {"WARM_PYTHON": warm_python()[-1], "PYTHONPATH": f"{SERVER.with_name('warm_start')}:{SERVER.parents[1]}"}


def warm_programs() -> list[psutil.Process]:
    """Return the warm programs that are running, of all tests of the suite."""
    serving = ["serve", warm_python()[-1]]
    named = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[2:4] == serving]
    return min(
        named, key=psutil.Process.create_time
    ).children()  # forks have the same command line until they set a title


def kill(client: int) -> None:
    """Kill the program of a client with SIGKILL; the client ends after it, so nothing is written after that."""
    os.kill(client, KILL)
