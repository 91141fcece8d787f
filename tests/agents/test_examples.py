"""The files under examples/, each run by the executor that a training run would build."""

import json
from pathlib import Path

import pytest
from sessions import Scripted, prompt, run

from openrlhf.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_math_verification_compares_expressions(build):
    file = str(EXAMPLES / "rewards/math_verification.py")
    sessions = [Scripted("so 0.5"), Scripted("it is 1/2"), Scripted("it is 3")]
    got = run(build(remote_rm_url=file), sessions, asked=prompt(label="\\frac{1}{2}"))
    assert [item.reward for item in got.trajectories] == [1.0, 1.0, 0.0]


def test_math_verification_names_its_missing_package(build, write):
    """A None in sys.modules makes the import fail."""
    missing = "import sys\nsys.modules['math_verify'] = None\n"
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        build(remote_rm_url=write(missing + (EXAMPLES / "rewards/math_verification.py").read_text()))


def test_format_and_length(build):
    rambling = "<think>" + "so " * 10 + "</think><answer>two </answer>"
    texts = ["<think>well</think><answer>Two.</answer>", "<think>well</think><answer>3</answer>", "two", rambling]
    sessions = [Scripted(text) for text in texts]
    executor = build(remote_rm_url=str(EXAMPLES / "rewards/format_and_length.py"), context_length=999)
    got = run(executor, sessions, asked=prompt(label="two"), max_tokens=900).trajectories
    assert [item.reward for item in got] == pytest.approx([1.0, 0.2, 0.0, 1.0])
    assert [item.score for item in got] == [1.0, 0.0, 0.0, 1.0]
    assert [item.extra_logs["well_formed"] for item in got] == [1.0, 1.0, 0.0, 1.0]


def test_code_execution_enforces_its_limits(write):
    """Call the function directly, because the tiny tokenizer has no backtick."""
    space = {}
    exec((EXAMPLES / "rewards/code_execution.py").read_text(), space)
    space["SECONDS"] = 1
    programs = [
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "def add(a, b): return a - b",
        "while True: pass",
        "import time; time.sleep(100)",
        "import sys; sys.exit(0)",
        "x = bytearray(1 << 31)",
        "open('big', 'wb').write(bytes(1 << 22))",
    ]
    queries = [f"do it: ```python\n{program}\n```" for program in programs] + ["do it: no code"]
    tests = "assert add(1, 2) == 3\n\nassert add(2, 2) == 4\n"
    got = space["reward_func"](queries, ["do it: "] * len(queries), [tests] * len(queries))
    assert got["rewards"] == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert got["scores"] == [1.0] + [0.0] * 8
    assert got["extra_logs"]["has_code"] == [1.0] * 8 + [0.0]


def test_guessing_game(build):
    executor = build(agent_func_path=str(EXAMPLES / "agents/guessing_game.py"), context_length=4000)
    found, lost = Scripted("is it 50", "25", "what", "37"), Scripted("1")
    got = run(executor, [found, lost], asked=prompt("guess: ", label="37")).trajectories
    assert [item.reward for item in got] == pytest.approx([0.75, 0.25 * 0.64])
    assert [item.score for item in got] == [1.0, 0.0]
    assert got[0].extra_logs == {"guesses": 4.0, "hit": 1.0, "nearest": 0.0}
    assert [len(session.requests) for session in (found, lost)] == [4, 7]


def test_calculator(build):
    executor = build(agent_func_path=str(EXAMPLES / "agents/calculator.py"), context_length=400)
    right = Scripted("hm <calc>2 * (3 + 4)</calc>", "<calc>14/0</calc>", "<answer>14</answer>")
    wrong, silent = Scripted("<answer>15</answer>"), Scripted("who knows")
    got = run(executor, [right, wrong, silent], asked=prompt("2*7? ", label="2*7 is #### 14"), max_tokens=50)
    assert [item.reward for item in got.trajectories] == [1.0, 0.0, 0.0]
    assert got.trajectories[0].extra_logs == {"tool_calls": 2.0, "answered": 1.0}
    second, third = (json.dumps(right.requests[place].prompt_token_ids) for place in (1, 2))
    assert third.startswith(second[:-1])
