"""Loading of a user's .py file, and detection of what it defines.

A reward file has `reward_func`; an agent file has a class `AgentExecutor`, a function `run_agent`, or the older `step`.
Accepted arguments are read from a function's signature, never found by trial calls.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from openrlhf.agents.interface import AgentExecutorBase
from openrlhf.errors import ConfigError

RewardCall = Callable[[list[str], list[str], list[Any]], Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
OLDER = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")  # arguments of 0.8.7 to 0.9.0
_numbers = itertools.count()


def load_module(file: str) -> ModuleType:
    """Execute the file as a new module with a unique name; it can import modules from its folder."""
    path = Path(file).expanduser().resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"openrlhf_user_{path.stem}_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up by name
    spec.loader.exec_module(module)
    return module


def find_reward(module: ModuleType, file: str, *, flag: str = "--remote_rm_url") -> RewardCall:
    """Return the file's reward_func, adapted to (queries, prompts, labels)."""
    found = vars(module).get("reward_func")
    if not callable(found):
        raise ConfigError(
            f"{flag} {file} has no function reward_func; it defines {defined(module)}",
            try_this="def reward_func(queries, prompts, labels): ...",
        )
    return adapt_reward(found, file)


def adapt_reward(function: Callable[..., Any], file: str) -> RewardCall:
    """Adapt a reward function of any supported signature to a call with (queries, prompts, labels).

    It may take three positional arguments, or two and optionally a keyword `labels`.
    """
    parameters = inspect.signature(function).parameters
    kinds = [item.kind for item in parameters.values()]
    room = 3 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in POSITIONAL for kind in kinds)
    required = [item for item in parameters.values() if item.kind in POSITIONAL and item.default is item.empty]
    if room < 2 or len(required) > 3:
        raise ConfigError(
            f"reward_func{inspect.signature(function)} in {file} cannot be called with (queries, prompts, labels)",
            try_this="def reward_func(queries, prompts, labels): ...",
        )
    if room >= 3:
        return function
    if "labels" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return lambda queries, prompts, labels: function(queries, prompts, labels=labels)
    return lambda queries, prompts, labels: function(queries, prompts)


def find_agent(module: ModuleType, file: str) -> type[AgentExecutorBase] | Literal["run_agent", "step"]:
    """Return the file's AgentExecutor class, or else the name of its agent function."""
    found = vars(module).get("AgentExecutor")
    if inspect.isclass(found):
        if not issubclass(found, AgentExecutorBase):
            raise ConfigError(
                f"class AgentExecutor in --agent_func_path {file} does not extend AgentExecutorBase",
                try_this="from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor",
            )
        check_arguments(found, file)
        check_is_whole(found, file)
        return found
    if callable(vars(module).get("run_agent")):
        return "run_agent"
    if callable(vars(module).get("step")):
        return "step"
    raise ConfigError(
        f"--agent_func_path {file} has neither class AgentExecutor nor function run_agent or step;"
        f" it defines {defined(module)}",
        try_this="class AgentExecutor(MultiTurnAgentExecutor): ...",
    )


def required_by(kind: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without a default."""
    kinds = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(kind).parameters.values()
    return [item.name for item in parameters if item.kind in kinds and item.default is item.empty]


def check_arguments(kind: type[AgentExecutorBase], file: str) -> None:
    """Reject a class whose constructor requires arguments that a run cannot supply."""
    unknown = [name for name in required_by(kind) if name not in OLDER]
    if unknown:
        raise ConfigError(
            f"class AgentExecutor in --agent_func_path {file} is built without arguments, but it wants"
            f" {', '.join(unknown)}",
            try_this="def __init__(self): super().__init__(AgentInstance)",
        )


def check_is_whole(kind: type[AgentExecutorBase], file: str) -> None:
    """Reject a class with unimplemented abstract methods; only the older form may leave out `execute`."""
    missing = sorted(kind.__abstractmethods__ - ({"execute"} if required_by(kind) else set()))
    if missing:
        raise ConfigError(
            f"class AgentExecutor in --agent_func_path {file} has no method {' and no '.join(missing)}",
            try_this="; ".join(head_of(getattr(kind, name)) for name in missing),
        )


def head_of(function: Callable[..., Any]) -> str:
    """Return the first line of a definition of this function, as a suggestion."""
    kind = "async def" if inspect.iscoroutinefunction(function) else "def"
    return f"{kind} {function.__name__}({', '.join(inspect.signature(function).parameters)}): ..."


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function accepts a keyword argument of this name, by itself or through **kwargs."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())


def defined(module: ModuleType) -> str:
    """List the names that the module itself defines, for a message."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(own) or "nothing"


async def make(kind: Callable[[], Any]) -> Any:
    """Create an instance; await an `async def __init__`, with which a plain call would raise TypeError."""
    if not (inspect.isclass(kind) and inspect.iscoroutinefunction(kind.__init__)):
        return kind()
    instance = kind.__new__(kind)
    await kind.__init__(instance)
    return instance
