"""Adapter for executor classes written for versions 0.8.7 to 0.9.0.

Those classes get engine, tokenizer and a queue in their constructor, and put the result of each episode into the queue.
A worker wraps them in `LegacyExecutor`, which has the current interface.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from openrlhf.agents.engine_proxy import current_call
from openrlhf.agents.interface import EpisodeExecutor, EpisodeResult, EpisodeTask, LLMEngine
from openrlhf.agents.loading import resolve
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.errors import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STEPS = 10_000  # turns per episode without --max_turns, as in those versions


class ResultQueue:
    """Queue that keeps the results of concurrent episodes apart, by the call whose code is running."""

    def __init__(self) -> None:
        self.results: dict[int | None, Any] = {}

    async def put(self, result: object) -> None:
        self.put_nowait(result)

    def put_nowait(self, result: object) -> None:
        self.results[current_call.get()] = result


class LegacyExecutor(EpisodeExecutor):
    """Wrapper of a legacy executor class; if it has no `execute` of its own, its agent plays multi-turn episodes."""

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
        """Build the user's class, with the constructor arguments that it names; all are also set as attributes."""
        borrowed = {"execute": EpisodeExecutor.execute, "run_episode": MultiTurnAgentExecutor.run_episode}
        concrete: Any = type(self.kind.__name__, (self.kind,), {} if self.has_execute else borrowed)
        names = inspect.signature(concrete).parameters
        self.inner = concrete(**{name: value for name, value in self.arguments.items() if name in names})
        vars(self.inner).update(self.arguments, semaphore=nullcontext(), max_turns=self.max_turns or MAX_STEPS)

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Run one episode; the result is what `execute` put into the queue, or else returned."""
        if not self.has_execute:
            return await self.inner.run_episode(task)
        returned = await resolve(self.inner.execute(task.prompt, task.label, task.sampling_params))
        result = self.queue.results.pop(current_call.get(), None)
        if result is None and returned is None:
            raise RolloutError("execute neither put a result into self.result_queue nor returned one")
        return returned if result is None else result
