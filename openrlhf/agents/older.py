"""Executors of 0.8.7 to 0.9.0: built with engine, tokenizer and a queue, into which they put each episode's result."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from openrlhf.agents.engine_proxy import current
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor, settled
from openrlhf.errors import RolloutError

MAX_STEPS = 10_000  # turns of an episode without --max_turns, as those versions had it


class ResultQueue:
    """Takes the results of the episodes that run side by side; each finds its own again."""

    def __init__(self) -> None:
        self.results: dict[int | None, Any] = {}

    async def put(self, result: Any) -> None:
        self.put_nowait(result)

    def put_nowait(self, result: Any) -> None:
        self.results[current.get()] = result

    def take(self) -> Any:
        return self.results.pop(current.get(), None)


class OlderExecutor(AgentExecutorBase):
    """Runs a class of that form; one without an `execute` of its own plays its agent over several turns."""

    def __init__(self, kind: Any, *, max_length: int, llm_engine: LLMEngine, hf_tokenizer: Any) -> None:
        self.kind = kind
        self.queue = ResultQueue()
        self.given = {
            "max_steps": MAX_STEPS,
            "max_length": max_length,
            "llm_engine": llm_engine,
            "hf_tokenizer": hf_tokenizer,
            "result_queue": self.queue,
        }

    async def prepare(self) -> None:
        """Builds the user's class: the engine and the tokenizer of this process are there by now."""
        self.has_execute = "execute" not in self.kind.__abstractmethods__
        methods = {} if self.has_execute else {"execute": MultiTurnAgentExecutor.execute}
        whole: Any = type(self.kind.__name__, (self.kind,), methods)
        names = inspect.signature(whole).parameters
        self.inner = whole(**{name: value for name, value in self.given.items() if name in names})
        vars(self.inner).update(self.given, semaphore=nullcontext(), max_turns=self.max_turns or MAX_STEPS)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        if not self.has_execute:
            return await self.inner.execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        returned = await settled(self.inner.execute(prompt, label, sampling_params))
        result = self.queue.take()
        if result is None and returned is None:
            raise RolloutError("execute neither put a result into self.result_queue nor returned one")
        return returned if result is None else result
