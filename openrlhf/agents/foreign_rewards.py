"""Reward functions with the signature of TRL or verl: how to call them from a `reward_func`.

Such a function could often be called with our arguments and would return wrong rewards without an error, because TRL's
(prompts, completions) would get our (queries, prompts). Therefore it is rejected, and the error contains the wrapper to
add to the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from openrlhf.errors import ConfigError

OURS = "(queries, prompts, labels)"
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
VERL_ARGUMENTS = {"data_source", "solution_str", "ground_truth"}
RESPONSE = "query[len(prompt):]"


def must_be_ours(function: Callable[..., object], name: str) -> None:
    """Raise ConfigError if the parameters of a function are those of TRL or verl; `name` is for the message."""
    parameters = inspect.signature(function).parameters
    is_ours = "queries" in parameters or list(parameters)[2:3] == ["labels"]
    if "completions" in parameters and not is_ours:
        framework, body = "TRL", trl_call(parameters)
    elif parameters.keys() >= VERL_ARGUMENTS:
        framework, body = "verl", verl_call()
    else:
        return
    own = getattr(function, "__name__", "reward")
    renamed = f"{framework.lower()}_reward" if own in ("reward_func", "<lambda>") else own
    rename = "" if renamed == own else f"call it {renamed}, and "
    raise ConfigError(
        f"{name} takes {inspect.signature(function)}, like a reward of {framework}: expected {OURS}, in which each"
        " query is a prompt with its response and the EOS token that ended it",
        try_this=f"{rename}add\ndef reward_func{OURS}:\n    return {body.format(name=renamed)}",
    )


def trl_call(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the source of a call in TRL's form; our labels are passed as the first dataset column that it requires."""
    arguments = ["prompts=prompts"] if "prompts" in parameters else []
    arguments.append(f"completions=[{RESPONSE} for query, prompt in zip(queries, prompts)]")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, item in parameters.items() if item.default is item.empty and item.kind not in variadic]
    columns = [name for name in required if name not in TRL_ARGUMENTS]
    arguments += [f"{name}=labels" for name in columns[:1]]
    return f"{{name}}({', '.join(arguments)})"


def verl_call() -> str:
    """Return the source of a list with one call per sample, in verl's form."""
    samples = "for query, prompt, label in zip(queries, prompts, labels)"
    return f'[{{name}}(data_source="", solution_str={RESPONSE}, ground_truth=label) {samples}]'
