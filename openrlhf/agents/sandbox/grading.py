"""Test a program written by a model, with a verdict that the program cannot forge.

Program and test run in two sandboxes, connected by a socket. In the test, the functions and classes of the program are
stand-ins: a call sends its arguments to the program and receives plain data (numbers, strings, lists, ...), which the
test compares. The program therefore has no access to the test, the expected values or the verdict, and its objects
never take part in a comparison. This defeats an `__eq__` that is always true, a patched `assert` or built-in, a search
through frames and memory, an early `os._exit(0)` and a message in place of a result.

    trainer: passes_test --- run_program(ANSWER) program's sandbox      answers calls
                         \\-- run_program(GRADE) test's sandbox          makes them, compares, exits with the verdict

Not prevented: a program that recognises the arguments of a known test and returns the right values for them.

Limits of the stand-ins: arguments must be plain data or results of the program, so a test cannot pass its own
functions. Results that are neither plain data nor arrays can be called, indexed, iterated and measured with len(), but
equal only themselves. Built-in names and modules of the standard library always refer to Python's own.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from openrlhf.agents.sandbox.program import DEFAULT_LIMITS, ProgramLimits, run_program

# Both sides encode values as JSON: numbers and strings unchanged, other values as [kind, content].
VALUES = """
import json

def encode(value, keep):
    if hasattr(value, "tolist"):
        value = value.tolist()  # arrays
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, keep) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    return ["object", keep(value)]

def decode(value, find):
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in ("list", "tuple", "set", "frozenset"):
        kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[kind](decode(item, find) for item in content)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    return find(content)
"""

# The program's side: run it, then answer the calls of the test.
ANSWER = (
    VALUES
    + """
import socket, sys

def serve(space):
    objects = []

    def keep(value):
        objects.append(value)
        return len(objects) - 1

    stream = socket.socket(fileno=3).makefile("rw", encoding="utf-8")
    for line in stream:
        action, target, name, arguments = json.loads(line)
        try:
            if action == "names":
                result, arguments = [key for key in space if isinstance(key, str)], []
            else:
                owner = decode(target, objects.__getitem__)
                arguments = decode(arguments, objects.__getitem__)
                result = {
                    "global": lambda: space[name],
                    "attribute": lambda: getattr(owner, name),
                    "call": lambda: owner(*arguments[0], **arguments[1]),
                    "item": lambda: owner[arguments],
                    "length": lambda: len(owner),
                    "items": lambda: list(owner),
                }[action]()
            reply = ["result", encode(result, keep), encode(arguments, keep)]
        except Exception as error:
            reply = ["error", type(error).__name__, str(error)]
        stream.write(json.dumps(reply) + "\\n")
        stream.flush()

space = {"__name__": "__main__", "__builtins__": __builtins__}
with open("solution.py", encoding="utf-8") as file:
    exec(compile(file.read(), "solution.py", "exec", dont_inherit=True), space)
serve(space)
"""
)

# The test's side: run the test with stand-ins for the program's names; the last line of output is the verdict.
GRADE = (
    VALUES
    + """
import ast, builtins, importlib, socket, sys

STREAM = socket.socket(fileno=3).makefile("rw", encoding="utf-8")
MOST = 1 << 22  # maximum characters of an answer

def ask(action, target=None, name=None, arguments=None):
    sent = encode(arguments, lambda value: value._number)
    STREAM.write(json.dumps([action, target, name, sent]) + "\\n")
    STREAM.flush()
    line = STREAM.readline(MOST)
    if not line.endswith("\\n"):
        raise ConnectionError("the program ended, or its answer is too long")
    kind, result, after = json.loads(line)
    if kind == "error":
        known = getattr(builtins, str(result), None)
        is_error = isinstance(known, type) and issubclass(known, Exception)
        is_error = is_error and known is not StopIteration  # would silently end a loop over map() in the test
        raise known(str(after)) if is_error else RuntimeError(str(after))
    if action == "call":
        update(arguments[0], decode(after, StandIn)[0])
    return decode(result, StandIn)

def update(given, after):
    "Copy the changes that the program made to its arguments into the lists, sets and dicts of the test."
    for old, new in zip(given, after):
        if type(old) is type(new) is list:
            old[:] = new
        elif type(old) is type(new) and type(old) in (set, dict):
            old.clear()
            old.update(new)

class StandIn:
    "An object of the program."
    __slots__ = ("_number",)
    def __init__(self, number):
        if type(number) is not int:
            raise TypeError("not a reference to an object")
        self._number = number
    def _ask(self, action, name=None, arguments=None):
        return ask(action, ["object", self._number], name, arguments)
    def __getattr__(self, name):
        if name.startswith("__") or name == "tolist":
            raise AttributeError(name)
        return self._ask("attribute", name)
    def __call__(self, *args, **kwargs):
        return self._ask("call", arguments=[list(args), kwargs])
    def __getitem__(self, key):
        return self._ask("item", arguments=key)
    def __len__(self):
        return self._ask("length")
    def __iter__(self):
        return iter(self._ask("items"))
    def __bool__(self):
        return True

with open("test.py", encoding="utf-8") as file:
    tree = ast.parse(file.read(), "test.py")
nodes = list(ast.walk(tree))
used = {node.id for node in nodes if isinstance(node, ast.Name)}
owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
space = {"__name__": "test"}
for name in used.intersection(ask("names")) - set(dir(builtins)):
    space[name] = ask("global", name=name)
for name in owners & sys.stdlib_module_names:
    space[name] = importlib.import_module(name)
exec(compile(tree, "test.py", "exec"), space)
print("\\npassed")
"""
)


def passes_test(solution: str, test: str, limits: ProgramLimits = DEFAULT_LIMITS) -> bool:
    """Return whether a program passes a test, such as `assert add(1, 2) == 3`, which uses its functions.

    The limits apply to program and test separately. A program that cannot run, ends early or exceeds a limit fails.
    """
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as thread:
        answering = thread.submit(run_program, ANSWER, files={"solution.py": solution}, limits=limits, channel=theirs)
        graded = run_program(GRADE, files={"test.py": test}, limits=limits, channel=ours)
        answering.result()  # raises if the program could not be run
    return graded.exit_code == 0 and graded.limit is None and graded.stdout.endswith("\npassed\n")
