"""Adapters for agent files of older versions.

The constructors of executor classes for 0.8.7 to 0.9.0 take an engine, a tokenizer and a queue, and the executor puts
the result of each episode into the queue. `LegacyExecutor` wraps them in the current interface.

Older files define a module-level function `step`, which keeps its state in globals and returns the whole text so far.
`MultiTurnAgentExecutor` runs them, with a new `StepFunction` as the environment of each episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from openrlhf.agents.engine_proxy import current_call
from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import (
    AgentInstanceBase,
    EpisodeExecutor,
    EpisodeResult,
    EpisodeTask,
    LLMEngine,
    StepStates,
)
from openrlhf.agents.loading import load_module, resolve, takes_keyword
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.scores import kind_of
from openrlhf.errors import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TUPLE = ("rewards", "next_observation", "done", "extra")  # the result of a step in 0.8.0 to 0.8.3
MAX_STEPS = 10_000  # turns per episode without --max_turns, as in those versions


class ResultQueue:
    """A queue that stores the results of concurrent episodes separately, by the call whose code is running."""

    def __init__(self) -> None:
        self.results: dict[int | None, EpisodeResult] = {}

    async def put(self, result: EpisodeResult) -> None:
        self.put_nowait(result)

    def put_nowait(self, result: EpisodeResult) -> None:
        self.results[current_call.get()] = result


class LegacyExecutor(EpisodeExecutor):
    """Wrapper of a legacy executor class; without a method `execute`, its agent runs multi-turn episodes."""

    inner: Any  # an instance of the user's class, built by `prepare`

    def __init__(self, kind: Any, max_length: int, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.kind = kind
        self.has_execute = "execute" not in kind.__abstractmethods__
        self.queue = ResultQueue()
        self.arguments = {
            "max_steps": MAX_STEPS,
            "max_length": max_length,
            "llm_engine": engine,
            "hf_tokenizer": tokenizer,
            "result_queue": self.queue,
        }

    async def prepare(self) -> None:
        """Create an instance of the user's class with the arguments it accepts; all are also set as attributes."""
        borrowed = {"execute": EpisodeExecutor.execute, "run_episode": MultiTurnAgentExecutor.run_episode}
        concrete: Any = type(self.kind.__name__, (self.kind,), {} if self.has_execute else borrowed)
        names = inspect.signature(concrete).parameters
        self.inner = concrete(**{name: value for name, value in self.arguments.items() if name in names})
        vars(self.inner).update(self.arguments, semaphore=nullcontext(), max_turns=self.max_turns or MAX_STEPS)

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Run one episode, and return the result that `execute` put into the queue or returned."""
        if not self.has_execute:
            return await self.inner.run_episode(task)
        returned = await resolve(self.inner.execute(task.prompt, task.label, task.sampling_params))
        result = self.queue.results.pop(current_call.get(), None)
        if result is None and returned is None:
            raise RolloutError("execute neither put a result into self.result_queue nor returned one")
        return returned if result is None else result


class StepFunction(AgentInstanceBase):
    """The environment of one episode; it executes the file again to reset its globals."""

    def __init__(self, file: str) -> None:
        self.step_function: Callable[..., object] = vars(load_module(file))["step"]
        self.takes_params = takes_keyword(self.step_function, "sampling_params")

    async def step(self, states: StepStates, **kwargs: object) -> dict[str, object]:
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
            raise RolloutError(f"step returned {kind_of(returned)}: expected a dict, or a tuple ({', '.join(TUPLE)})")
        after = result.get("next_observation", result.get("next_state"))  # called next_state in 0.8.3
        result["environment_feedback"] = find_feedback(after, observation + action, bool(result.get("done")))
        return result


def find_feedback(after: object, before: str, done: bool) -> str:
    """Return the text that the environment appended to `before`.

    The environment must not change earlier text, because the policy has already read those tokens.
    """
    if after is None and done:
        return ""
    if not isinstance(after, str):
        raise RolloutError(f"step returned {kind_of(after)} as 'next_observation': expected a string")
    if after.startswith(before):
        return after[len(before) :]
    pairs = enumerate(zip(after, before, strict=False))
    place = next((index for index, (new, old) in pairs if new != old), min(len(after), len(before)))
    near = max(0, place - 20)
    raise RolloutError(
        "the 'next_observation' that step returned does not begin with observation + action: at character"
        f" {place} it has {shorten(after[near : place + 40])}, but observation + action has"
        f" {shorten(before[near : place + 40])}"
    )
