"""Load a user's .py file, and call the functions and classes that it defines.

A reward file defines `reward_func`; for agent files, see `agent_files.py`. The accepted arguments are read from a
function's signature, without trial calls. User functions may be sync or async.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from openrlhf.agents.foreign_rewards import must_be_ours
from openrlhf.errors import ConfigError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Instance = TypeVar("Instance")
_numbers = itertools.count()


@dataclass(frozen=True)
class RewardFunction:
    """A user's reward function, adapted to the arguments (queries, prompts, labels)."""

    function: Callable[[list[str], list[str], list[object]], object]
    is_async: bool  # it returns a coroutine

    def __call__(self, queries: list[str], prompts: list[str], labels: list[object]) -> object:
        return self.function(queries, prompts, labels)


class UncachedLoader(SourceFileLoader):
    """Compiles the file each time: Python's cache misses changes within a second that keep the size of the file."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_module(file: str) -> ModuleType:
    """Execute the file as a new module with a unique name; it can import other modules from its folder."""
    path = Path(file).expanduser().resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"openrlhf_user_{path.stem}_{next(_numbers)}"
    loader = UncachedLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py":
        raise ConfigError(f"{file} cannot be loaded: expected a Python file (.py)")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up by name
    try:
        loader.exec_module(module)
    except SyntaxError as error:  # in the file, or in a module that it imports
        line = "" if error.text is None else f": {error.text.strip()}"
        place = f"{error.filename}:{error.lineno}{line}"
        raise ConfigError(f"{file} cannot be loaded: {type(error).__name__}, {error.msg}, at {place}") from None
    return module


def defined_names(module: ModuleType) -> str:
    """List the names that the module itself defines, for an error message."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(own) or "nothing"


def find_reward(module: ModuleType, file: str, *, flag: str = "--remote_rm_url") -> RewardFunction:
    """Return the file's reward_func, adapted to (queries, prompts, labels)."""
    found = vars(module).get("reward_func")
    if not callable(found):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                must_be_ours(value, f"{name} in {file}")
        raise ConfigError(
            f"{flag} {file} has no function reward_func; it defines {defined_names(module)}",
            try_this="def reward_func(queries, prompts, labels): ...",
        )
    return adapt_reward(found, f"reward_func in {file}")


def adapt_reward(function: Callable[..., object], name: str) -> RewardFunction:
    """Adapt a reward function to a call with (queries, prompts, labels); `name` is for error messages.

    It may take three positional arguments, or two and optionally a keyword argument `labels`.
    """
    must_be_ours(function, name)
    parameters = inspect.signature(function).parameters
    kinds = [item.kind for item in parameters.values()]
    accepted = 3 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in POSITIONAL for kind in kinds)
    required = [item for item in parameters.values() if item.kind in POSITIONAL and item.default is item.empty]
    if accepted < 2 or len(required) > 3:
        raise ConfigError(
            f"{name} takes {inspect.signature(function)}, so it cannot be called with (queries, prompts, labels)",
            try_this="def reward_func(queries, prompts, labels): ...",
        )
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    if accepted >= 3:
        return RewardFunction(function, is_async)
    if "labels" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return RewardFunction(lambda queries, prompts, labels: function(queries, prompts, labels=labels), is_async)
    return RewardFunction(lambda queries, prompts, labels: function(queries, prompts), is_async)


def defined_in(code: object) -> str:
    """Return the file that defines a function, a class or the class of an instance; empty if there is none."""
    methods = vars(code if inspect.isclass(code) else type(code)).values()
    candidates: tuple[Any, ...] = (code, *methods)
    functions = (item for item in map(inspect.unwrap, candidates) if inspect.isfunction(item))
    return next((item.__code__.co_filename for item in functions), "")


def takes_keyword(function: Callable[..., object], name: str) -> bool:
    """Return True if a function accepts a keyword argument of this name, possibly through **kwargs."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())


async def create_instance(kind: Callable[[], Instance]) -> Instance:
    """Create an instance; await `__init__` if it is async, because a plain call would raise a TypeError."""
    if not (inspect.isclass(kind) and inspect.iscoroutinefunction(kind.__init__)):
        return kind()
    instance = kind.__new__(kind)
    await kind.__init__(instance)
    return instance


async def resolve(result: object) -> Any:
    """Await the result of a user's function if it is awaitable, else return it."""
    return await result if inspect.isawaitable(result) else result
