"""Python programs for tests as forks of a warm interpreter: importing torch and vLLM takes ten seconds, a fork none."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.fork_server import KILL

SERVER = Path(__file__).with_name("fork_server.py")
IMPORTED = (
    "openrlhf.launch.rl",
    "openrlhf.launch.supervised",
    "openrlhf.launch.ray.worker",
    "deepspeed",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


@cache
def warm_python() -> tuple[str, ...]:
    """Words to put in place of `sys.executable`; the server that they ask ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm", dir=os.environ["RAY_TMPDIR"])
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVER.parents[1])}
    address = f"{folder}/socket"
    reading, _ = os.pipe()  # the server ends when this process does, and with it the other end
    subprocess.run([sys.executable, str(SERVER), "serve", address, *IMPORTED], env=environ, stdin=reading, check=True)
    os.close(reading)
    return sys.executable, "-I", "-S", str(SERVER), "run", address


def kill(client: int) -> None:
    """SIGKILL to the program behind a client, which ends when the program has: nothing is written after that."""
    os.kill(client, KILL)
