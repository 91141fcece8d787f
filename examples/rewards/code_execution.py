"""The share of tests that the response's Python code passes, each test in a process of its own.

The label is a list of tests, or a text with one test a line: `assert add(1, 2) == 3`. Each runs after the last
```python block of the response, in an empty folder, with limits on time, memory and files; what it prints is thrown
away. This keeps accidents in, not attackers: run code of unknown origin in a container.

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-Coder-1.5B-Instruct --prompt_data data.jsonl \\
        --input_key problem --label_key tests --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --remote_rm_url examples/rewards/code_execution.py
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS = 5
MEMORY = 1 << 30  # bytes
FILE_SIZE = 1 << 20
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
# Runs in the child before the program: sets its limits and, on Linux, makes it die with its parent.
START = f"""
import ctypes, resource, runpy, signal, sys
for name, most in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {FILE_SIZE}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
runpy.run_path("program.py", run_name="__main__")
"""


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    programs = [code_of(response) for response in responses]
    with ThreadPoolExecutor(max_workers=2) as runners:
        shares = list(runners.map(share_passed, programs, labels))
    return {
        "rewards": shares,
        "scores": [float(share == 1.0) for share in shares],
        "extra_logs": {"has_code": [float(program is not None) for program in programs]},
    }


def code_of(response):
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else None


def share_passed(program, label):
    tests = [line for line in label.splitlines() if line.strip()] if isinstance(label, str) else list(label)
    if not tests:
        raise ValueError("the label contains no test")
    if program is None:
        return 0.0
    return sum(passes(program, test) for test in tests) / len(tests)


def passes(program, test):
    """Return whether the program passes its test within the limits; exiting early does not count."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(f"{program}\n\n{test}\nopen({mark!r}, 'x').close()\n", encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", START],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the program and whatever it started
        child.wait()
        return Path(folder, mark).exists()
