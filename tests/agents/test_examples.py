"""The files under examples/, each run by the executor that a training run would build."""

import json
import textwrap
import time
from pathlib import Path

import pytest
from sessions import Scripted, prompt, run

from openrlhf.agents.sandbox.program import OPT_IN, ProgramLimits, close_servers, run_program
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


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(("seconds", "last"), [(8, 1.0), (1, 0.0)], ids=["a share for each", "time is up"])
def test_slow_answers_do_not_use_up_the_reward_timeout(seconds, last):
    space = {}
    exec((EXAMPLES / "rewards/math_verification.py").read_text(), space)
    space["GROUP_SECONDS"] = seconds
    began = time.monotonic()
    got = space["reward_func"]([r"\boxed{9^{9^{9^{9}}}}"] * 3 + ["it is 3"], [""] * 4, ["3"] * 4)
    assert time.monotonic() - began < 10  # not 3 * 5 and more
    assert got["rewards"] == [0.0, 0.0, 0.0, last]


def test_format_and_length(build):
    rambling = "<think>" + "so " * 10 + "</think><answer>two </answer>"
    texts = ["<think>well</think><answer>Two.</answer>", "<think>well</think><answer>3</answer>", "two", rambling]
    sessions = [Scripted(text) for text in texts]
    executor = build(remote_rm_url=str(EXAMPLES / "rewards/format_and_length.py"), context_length=999)
    got = run(executor, sessions, asked=prompt(label="two"), max_tokens=900).trajectories
    assert [item.reward for item in got] == pytest.approx([1.0, 0.2, 0.0, 1.0])
    assert [item.score for item in got] == [1.0, 0.0, 0.0, 1.0]
    assert [item.extra_logs["well_formed"] for item in got] == [1.0, 1.0, 0.0, 1.0]


CHEATS = {
    "reads its own source": """
        import os, re, sys
        for path in (sys.argv[0], "program.py", "solution.py", "test.py"):
            try:
                for mark in re.findall(r"[0-9a-f]{16}|passed", open(path).read()):
                    open(mark, "x").close()
                    print(mark)
            except OSError:
                pass
    """,
    "equals everything": """
        class Yes(int):
            def __eq__(self, other): return True
            __ne__ = __bool__ = __eq__
        def add(a, b): return Yes()
    """,
    "equals everything without being a number": """
        class Yes:
            def __eq__(self, other): return True
            def __len__(self): return 1
        def add(a, b): return Yes()
    """,
    "patches built-in names": """
        import builtins
        class Quiet(Exception): pass
        builtins.AssertionError = Quiet
        def add(a, b): return None
        def abs(x): return 0
        def print(*args): pass
    """,
    "exits early": "import os; print('passed'); os._exit(0)",
    "exits in the call": "import os\ndef add(a, b): print('passed', flush=True); os._exit(0)",
    "raises SystemExit in the test": "def add(a, b): raise type('SystemExit', (Exception,), {})(0)",
    "answers in place of the grader": """
        import os
        os.write(3, b'["result", true, [[], {}]]\\n' * 9 + b"passed\\n")
        os._exit(0)
    """,
    "refers to objects that are not there": """
        import os
        os.write(3, b'["result", ["object", "__class__"], [[], {}]]\\n["result", ["nothing", 1], 1]\\n')
        os._exit(0)
    """,
    "searches frames and objects": """
        import gc, sys
        def add(a, b):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    if isinstance(value, str) and "assert add" in value:
                        return eval(value.split("==")[1])
                frame = frame.f_back
            for value in gc.get_objects():
                if isinstance(value, (str, dict)) and "assert add" in str(value)[:100000].replace("'assert add'", ""):
                    return 3
    """,
    "nests its answer": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "answers without end": "def add(a, b): return 'x' * (1 << 26)",
}


@pytest.fixture
def code_reward(monkeypatch):
    """Return the module of the example; on a machine that cannot isolate programs, the opt-in lets its logic run."""
    space = {}
    exec((EXAMPLES / "rewards/code_execution.py").read_text(), space)
    try:
        run_program("pass")
    except ConfigError:
        monkeypatch.setenv(OPT_IN, "1")
    yield space
    close_servers()


@pytest.mark.slow(seconds=6)
def test_code_execution_enforces_its_limits(code_reward):
    """Call the function directly, because the tiny tokenizer has no backtick."""
    code_reward["LIMITS"] = ProgramLimits(seconds=3, memory=1 << 28, file_size=1 << 20)
    programs = [
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "def add(a, b): return a - b",
        "while True: pass",
        "import time; time.sleep(100)",
        "import sys; sys.exit(0)",
        "x = bytearray(1 << 31)",
        "open('big', 'wb').write(bytes(1 << 22))",
        "",
        "this is not Python \\0 \ud800",
    ]
    queries = [f"do it: ```python\n{program}\n```" for program in programs] + ["do it: no code"]
    tests = "assert add(1, 2) == 3\n\nassert add(2, 2) == 4\n"
    got = code_reward["reward_func"](queries, ["do it: "] * len(queries), [tests] * len(queries))
    assert got["rewards"] == [1.0, 0.5] + [0.0] * 9
    assert got["scores"] == [1.0] + [0.0] * 10
    assert got["extra_logs"]["has_code"] == [1.0] * 10 + [0.0]


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("count", [1, 4])
def test_programs_that_hang_do_not_use_up_the_reward_timeout(code_reward, count):
    code_reward |= {"LIMITS": ProgramLimits(seconds=2), "GROUP_SECONDS": 4}
    began = time.monotonic()
    queries = ["```python\nwhile True: pass\n```"] * count
    got = code_reward["reward_func"](queries, [""] * count, ["assert add(1, 2) == 3\n" * 8] * count)
    assert time.monotonic() - began < 12  # not 8 * 2 and more
    assert got["rewards"] == [0.0] * count


def test_a_program_cannot_end_the_loop_of_a_test(code_reward):
    program = "def add(a, b): raise StopIteration"
    test = "assert all(map(lambda case: add(*case) == 3, [(1, 2), (2, 1)]))"
    assert code_reward["reward_func"]([f"```python\n{program}\n```"], [""], [[test]])["rewards"] == [0.0]


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("cheat", CHEATS)
def test_code_execution_cannot_be_cheated(code_reward, cheat):
    """A program that does not solve the task gets nothing, however it tries."""
    code_reward["LIMITS"] = ProgramLimits(seconds=3, memory=1 << 28)
    source = textwrap.dedent(CHEATS[cheat])
    tests = ["assert add(1, 2) == 3", "assert abs(add(1, 2) - 3) < 1e-6", "assert add(1, 2) in (3,)"]
    got = code_reward["reward_func"]([f"```python\n{source}\n```"], [""], [tests])
    assert got["rewards"] == [0.0]


@pytest.mark.parametrize(
    "test",
    [
        "numbers = [3, 1, 2]\nsort(numbers)\nassert numbers == [1, 2, 3]",
        "def check(candidate):\n    for n in range(5):\n        assert candidate(n, 1) == n + 1\ncheck(add)",
        "stack = Stack(2)\nstack.push((1, {2}))\nassert stack.items == [(1, {2})] and len(stack) == 1",
        "try:\n    add(1, 'x')\n    assert False\nexcept TypeError:\n    pass",
        "assert math.isclose(add(0.1, 0.2), 0.3)",
        "assert add({'a': [b'x']}, None) == {'a': [b'x']}",
        "assert list(countdown(3)) == [3, 2, 1]",
        "from collections import Counter\nassert add(Counter('aab'), None) == Counter('aab')",
        "assert add(2**100, 0) == 2**100 and str(add(float('nan'), 0)) == 'nan' and add(1j, 1) == 1 + 1j",
    ],
)
def test_code_execution_understands_usual_tests(code_reward, test):
    program = """
import math
def add(a, b): return a if b is None else a + b
def sort(numbers): numbers.sort()
def countdown(n):
    while n:
        yield n
        n -= 1
class Stack:
    def __init__(self, most): self.items, self.most = [], most
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
"""
    got = code_reward["reward_func"]([f"```python\n{program}\n```"], [""], [[test]])
    assert got["rewards"] == [1.0]


@pytest.mark.slow(seconds=2)
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
