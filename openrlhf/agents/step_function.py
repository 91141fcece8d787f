"""Adapter for older agent files, which define a module-level function `step`.

Such a function keeps its state in globals and returns the whole text so far. A worker runs such files with
`MultiTurnAgentExecutor` and a new `StepFunction` as the environment of each episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentInstanceBase, StepStates
from openrlhf.agents.loading import load_module, resolve, takes_keyword
from openrlhf.agents.scores import kind_of
from openrlhf.errors import RolloutError

TUPLE = ("rewards", "next_observation", "done", "extra")  # the result of a step in 0.8.0 to 0.8.3


class StepFunction(AgentInstanceBase):
    """Environment of one episode; executes the file again, so that its globals have their initial values."""

    def __init__(self, file: str) -> None:
        self.step_function: Callable[..., object] = vars(load_module(file))["step"]
        self.takes_params = takes_keyword(self.step_function, "sampling_params")

    async def step(self, states: StepStates, **kwargs: object) -> dict[str, Any]:
        """Call the file's `step` and derive the feedback from the text it returns."""
        observation, action = states["observation_text"], states["action_text"]
        more = {"sampling_params": states["sampling_params"]} if self.takes_params else {}
        returned = await resolve(self.step_function(observation, action, states["label"], **more))
        if isinstance(returned, Mapping):
            result = dict(returned)
        elif isinstance(returned, tuple) and len(returned) == len(TUPLE):
            named = dict(zip(TUPLE, returned, strict=True))
            extra = named.pop("extra")
            result = (dict(extra) if isinstance(extra, Mapping) else {}) | named
        else:
            raise RolloutError(f"step returned {kind_of(returned)}; expected a dict, or a tuple ({', '.join(TUPLE)})")
        after = result.get("next_observation", result.get("next_state"))  # the name in 0.8.3
        result["environment_feedback"] = find_feedback(after, observation + action, bool(result.get("done")))
        return result


def find_feedback(after: object, before: str, done: bool) -> str:
    """Return the text that the environment appended to `before`.

    It may only append: the policy has already read everything before, and those tokens cannot change.
    """
    if after is None and done:
        return ""
    if not isinstance(after, str):
        raise RolloutError(f"'next_observation' of step is {kind_of(after)}; expected a text")
    if after.startswith(before):
        return after[len(before) :]
    pairs = enumerate(zip(after, before, strict=False))
    place = next((index for index, (new, old) in pairs if new != old), min(len(after), len(before)))
    near = max(0, place - 20)
    raise RolloutError(
        f"'next_observation' of step does not begin with observation + action: at character {place} it has"
        f" {shorten(after[near : place + 40])}, but observation + action has {shorten(before[near : place + 40])}"
    )
