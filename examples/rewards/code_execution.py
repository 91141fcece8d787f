"""The share of tests that the response's Python code passes, each test in a separate sandbox.

The label is a list of tests, or text with one test per line: `assert add(1, 2) == 3`. Each runs against the last
```python block of the response, which sees neither the test nor the expected value: it only receives the arguments of
its functions and returns results (openrlhf/agents/sandbox/grading.py). On a machine that cannot isolate programs, the
run ends with a line that says what to do (docs/agents.md).

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-Coder-1.5B-Instruct --prompt_data data.jsonl \\
        --input_key problem --label_key tests --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --remote_rm_url examples/rewards/code_execution.py
"""

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from openrlhf.agents.sandbox.grading import passes_test
from openrlhf.agents.sandbox.program import ProgramLimits

WORKERS = 2
GROUP_SECONDS = 120  # for all samples of a call; programs that hang must not use up --reward_timeout (180)
LIMITS = ProgramLimits(seconds=5, memory=1 << 30, file_size=1 << 20)
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    programs = [code_of(response) for response in responses]
    seconds = GROUP_SECONDS / math.ceil(len(programs) / WORKERS)
    with ThreadPoolExecutor(WORKERS) as runners:
        shares = list(runners.map(lambda program, label: share_passed(program, label, seconds), programs, labels))
    return {
        "rewards": shares,
        "scores": [float(share == 1.0) for share in shares],
        "extra_logs": {"has_code": [float(program is not None) for program in programs]},
    }


def code_of(response):
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else None


def share_passed(program, label, seconds):
    """Return the share of tests that pass before all of them have taken `seconds`; the rest fail."""
    tests = [line for line in label.splitlines() if line.strip()] if isinstance(label, str) else list(label)
    if not tests:
        raise ValueError("the label contains no test")
    if program is None:
        return 0.0
    passed, deadline = 0, time.monotonic() + seconds
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        passed += passes_test(program, test, replace(LIMITS, seconds=min(LIMITS.seconds, left)))
    return passed / len(tests)
