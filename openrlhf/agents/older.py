"""Adapter for executor classes written for versions 0.8.7 to 0.9.0.

Those classes get engine, tokenizer and a queue in their constructor, and put the result of each episode into the queue.
A worker wraps them in `OlderExecutor`, which has today's interface.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from openrlhf.agents.engine_proxy import current
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor, settled
from openrlhf.errors import RolloutError

MAX_STEPS = 10_000  # turns per episode without --max_turns, as in those versions


class ResultQueue:
    """Queue that keeps the results of concurrent episodes apart, by the call whose code is running."""

    def __init__(self) -> None:
        self.results: dict[int | None, Any] = {}

    async def put(self, result: Any) -> None:
        self.put_nowait(result)

    def put_nowait(self, result: Any) -> None:
        self.results[current.get()] = result

    def take(self) -> Any:
        """Remove and return the result of the running episode; None if there is none."""
        return self.results.pop(current.get(), None)


class OlderExecutor(AgentExecutorBase):
    """Wrapper of an older executor class; if it has no `execute` of its own, its agent plays multi-turn episodes."""

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
        """Build the user's class, with the constructor arguments that it names; all are also set as attributes."""
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
        """Run one episode; the result is what `execute` put into the queue, or else returned."""
        if not self.has_execute:
            return await self.inner.execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        returned = await settled(self.inner.execute(prompt, label, sampling_params))
        result = self.queue.take()
        if result is None and returned is None:
            raise RolloutError("execute neither put a result into self.result_queue nor returned one")
        return returned if result is None else result
