"""Find the executor or function in an agent file or object, and return an executor that runs it.

An agent file defines a class `AgentExecutor`, a function `run_agent`, or the older `step`. A worker calls `find_agent`
when it loads the file, so that mistakes are reported before training, together with the line to add. From Python, an
agent may also be an object: a class of environments, an executor or its class, or a function like `run_agent`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from types import ModuleType

from openrlhf.agents.interface import AgentExecutorBase, AgentInstanceBase
from openrlhf.agents.legacy import StepFunction
from openrlhf.agents.loading import POSITIONAL, defined_names
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.config.in_memory import object_name
from openrlhf.errors import ConfigError

# Constructor arguments of executors written for 0.8.7 to 0.9.0, which `LegacyExecutor` supplies.
LEGACY_ARGUMENTS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")


def find_agent(module: ModuleType, file: str) -> Callable[[], AgentExecutorBase]:
    """Return a constructor of the executor for an agent file; only legacy classes take arguments."""
    found = vars(module).get("AgentExecutor")
    if inspect.isclass(found):
        return check_executor(found, f"class AgentExecutor in --agent_func_path {file}")
    run_agent, step = vars(module).get("run_agent"), vars(module).get("step")
    if callable(run_agent):
        return executor_of_function(run_agent)
    if callable(step):
        return lambda: MultiTurnAgentExecutor(lambda: StepFunction(file))
    raise ConfigError(
        f"--agent_func_path {file} has neither a class AgentExecutor nor a function run_agent or step;"
        f" it defines {defined_names(module)}",
        try_this="class AgentExecutor(MultiTurnAgentExecutor): ...",
    )


def agent_of_object(agent: object) -> Callable[[], AgentExecutorBase]:
    """Return a constructor of the executor for an object that a Python caller passed as an agent."""
    name = f"agent={object_name(agent)}"
    if isinstance(agent, AgentExecutorBase):
        return lambda: agent
    if inspect.isclass(agent) and issubclass(agent, AgentInstanceBase):
        must_be_complete(agent, name)
        return lambda: MultiTurnAgentExecutor(agent)
    if inspect.isclass(agent):
        return check_executor(agent, name)
    if inspect.isfunction(agent):
        return executor_of_function(agent)
    if isinstance(agent, AgentInstanceBase):
        raise ConfigError(
            f"{name} is one environment, but each sample needs its own", try_this="pass its class instead"
        )
    raise ConfigError(
        f"{name} is a {type(agent).__name__}: expected a subclass of AgentInstanceBase, an executor or a function",
        try_this="from openrlhf.utils.agent import AgentInstanceBase",
    )


def executor_of_function(run_agent: Callable[..., object]) -> Callable[[], AgentExecutorBase]:
    """Return a constructor of the executor for a function that talks to the policy through OpenAI's client."""
    from openrlhf.agents.chat.openai_agent import make_executor  # imported late, because it is slow

    return lambda: make_executor(run_agent)


def check_executor(kind: type[object], name: str) -> type[AgentExecutorBase]:
    """Return the class; raise ConfigError if it is not an executor, requires unknown arguments, or lacks a method."""
    if not issubclass(kind, AgentExecutorBase):
        raise ConfigError(
            f"{name} does not extend AgentExecutorBase",
            try_this="from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor",
        )
    required = required_arguments(kind)
    unknown = [argument for argument in required if argument not in LEGACY_ARGUMENTS]
    if unknown:
        raise ConfigError(
            f"{name} is created without arguments, but its constructor requires {', '.join(unknown)}",
            try_this="def __init__(self): super().__init__(AgentInstance)",
        )
    must_be_complete(kind, name, optional={"execute"} if required else frozenset())  # optional in legacy classes
    return kind


def must_be_complete(
    kind: type[AgentExecutorBase | AgentInstanceBase], name: str, optional: Set[str] = frozenset()
) -> None:
    """Raise ConfigError if the class lacks a method that its base class requires."""
    missing = sorted(kind.__abstractmethods__ - optional)
    if missing:
        heads: list[str] = []
        for method in missing:
            function = getattr(kind, method)
            keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
            heads.append(f"{keyword} {method}({', '.join(inspect.signature(function).parameters)}): ...")
        raise ConfigError(f"{name} has no method {' and no '.join(missing)}", try_this="; ".join(heads))


def required_arguments(kind: Callable[..., object]) -> list[str]:
    """Return the names of the arguments without a default."""
    kinds = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(kind).parameters.values()
    return [item.name for item in parameters if item.kind in kinds and item.default is item.empty]
