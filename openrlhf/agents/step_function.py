"""Adapter for older agent files, which define a module-level function `step`.

It keeps its state in globals and returns the whole text so far. A worker runs such files with `MultiTurnAgentExecutor`
and a new `StepFunction` as the environment of each episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentInstanceBase
from openrlhf.agents.loading import load_module, takes_keyword
from openrlhf.agents.multi_turn import settled
from openrlhf.agents.scores import kind_of
from openrlhf.errors import RolloutError

TUPLE = ("rewards", "next_observation", "done", "extra")


class StepFunction(AgentInstanceBase):
    """Environment of one episode; executes the file again, so that its globals have their initial values."""

    def __init__(self, file: str) -> None:
        self.step_function: Any = vars(load_module(file))["step"]
        self.takes_params = takes_keyword(self.step_function, "sampling_params")

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Call the file's `step` and derive the feedback from the text it returns."""
        observation, action = states["observation_text"], states["action_text"]
        more = {"sampling_params": states["sampling_params"]} if self.takes_params else {}
        result = as_dict(await settled(self.step_function(observation, action, states["label"], **more)))
        after = result.get("next_observation", result.get("next_state"))  # the name in 0.8.3
        result["environment_feedback"] = feedback_in(after, observation + action, bool(result.get("done")))
        return result


def as_dict(result: Any) -> dict[str, Any]:
    """Convert the result of a step to a dict; 0.8.0 to 0.8.3 used a tuple (reward, next state, done, extra)."""
    if isinstance(result, Mapping):
        return dict(result)
    if not isinstance(result, tuple) or len(result) != len(TUPLE):
        raise RolloutError(f"step returned {kind_of(result)}; expected a dict, or a tuple ({', '.join(TUPLE)})")
    named = dict(zip(TUPLE, result, strict=True))
    extra = named.pop("extra")
    return (dict(extra) if isinstance(extra, Mapping) else {}) | named


def feedback_in(after: Any, before: str, done: bool) -> str:
    """Return the text that the environment appended.

    It may only append: the policy has already read everything before, and those tokens cannot change.
    """
    if after is None and done:
        return ""
    if not isinstance(after, str):
        raise RolloutError(f"'next_observation' of step is {kind_of(after)}, not a text")
    if after.startswith(before):
        return after[len(before) :]
    place = next(
        (i for i, (a, b) in enumerate(zip(after, before, strict=False)) if a != b), min(len(after), len(before))
    )
    near = max(0, place - 20)
    raise RolloutError(
        f"'next_observation' of step does not begin with observation + action: at character {place} it has"
        f" {shorten(after[near : place + 40])}, where observation + action has {shorten(before[near : place + 40])}"
    )
