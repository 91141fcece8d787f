"""Executor for agents that use OpenAI's client.

`run_agent` gets a base_url and a key, calls the policy like any OpenAI-compatible server, and returns the reward.
The conversation is the training sample. The server (`server.py`) runs in the same worker process, on its event loop;
`run_agent` runs in a thread, so it may block.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat.episode import ChatExecutor
from openrlhf.agents.chat.wire import ToolCall, find_calls
from openrlhf.agents.interface import EpisodeResult, EpisodeTask
from openrlhf.agents.loading import resolve
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import kind_of
from openrlhf.config.checks.extras import require
from openrlhf.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from openrlhf.agents.chat.server import ChatServer

OFFERED = ("base_url", "api_key", "prompt", "label", "session_id", "seed")  # arguments that run_agent may declare
RESULT = "expected a number, or a dict with 'reward' (and 'scores', 'extra_logs')"


class OpenAIAgentExecutor(ChatExecutor):
    """Executor that serves the policy at a separate base_url for each episode; extend it with `run_agent`.

    `run_agent` may be sync or async and may use any client, because it runs in its own thread. It declares the
    arguments it needs out of base_url, api_key, prompt, label, session_id and seed, and returns the reward.
    """

    server: ChatServer  # set by `prepare`, like `arguments`
    arguments: list[str]  # names of the arguments that run_agent declares

    @abstractmethod
    def run_agent(self, base_url: str, api_key: str, prompt: str, label: Any) -> object:
        """Run the agent against the policy at base_url; return a reward or {reward, scores, extra_logs}."""

    def find_calls(self, text: str, number: int) -> tuple[str, list[ToolCall]]:
        """Return the text of a turn without its tool calls, and the calls in the format of OpenAI's clients.

        The default parses the format of Qwen and Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
        Override this for a model with another format; return the arguments of a call as a dict.
        """
        return find_calls(text, number)

    async def prepare(self) -> None:
        """Check run_agent and the flags, and start the server."""
        require("aiohttp", "an agent with run_agent")
        self.arguments = accepted_arguments(self.run_agent)
        await super().prepare()
        from openrlhf.agents.chat.server import HOST, ChatServer  # imports aiohttp, an optional dependency

        # Clients in this process must reach the server directly, even if the environment sets a proxy.
        known = {os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")}
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [*sorted(known), HOST]))
        self.server = ChatServer()
        await self.server.start()

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Serve one episode while run_agent runs; return its conversation with the agent's reward.

        An error in serving the agent's requests takes precedence over the agent's result and exceptions. If run_agent
        raises because the episode is full, the reward is 0.
        """
        episode = self.open_chat(task, self.find_calls)
        offered = {
            "base_url": self.server.open(episode),
            "api_key": episode.key,
            "prompt": task.prompt,
            "label": task.label,
            "session_id": episode.name,
            "seed": getattr(task.engine, "seed", 0),
        }
        result: object = 0.0
        try:
            result = await call_in_thread(self.run_agent, {name: offered[name] for name in self.arguments})
        except Exception as error:  # user code may raise anything, and its client wraps our errors
            if episode.error is not None:
                raise episode.error from error
            if not episode.is_full:
                raise
        finally:
            self.server.close(episode)
        if episode.error is not None:
            raise episode.error
        if not episode.outputs:
            raise RolloutError("run_agent returned without sending a request to base_url with its api_key")
        return {**episode.result(), **read_result(result, scored_later=self.scored_later)}


def make_executor(function: Callable[..., object]) -> OpenAIAgentExecutor:
    """Return the executor for a file with a function run_agent instead of a class."""

    class FunctionAgent(OpenAIAgentExecutor):
        run_agent = staticmethod(function)

    return FunctionAgent()


def accepted_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names from OFFERED that run_agent declares in its signature."""
    parameters = inspect.signature(function).parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return list(OFFERED)
    unknown = [item.name for item in parameters if item.name not in OFFERED and item.default is item.empty]
    if unknown:
        raise ConfigError(
            f"run_agent{inspect.signature(function)} requires {', '.join(unknown)}; it may take {', '.join(OFFERED)}",
            try_this="async def run_agent(base_url, api_key, prompt, label): ...",
        )
    return [item.name for item in parameters if item.name in OFFERED]


async def call_in_thread(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call a function in a new thread; run an async one on an event loop of that thread.

    A bounded pool could deadlock: its agents wait for the engine, while the engine's batch waits for queued agents.
    """

    def call() -> object:
        result = function(**arguments)
        return asyncio.run(resolve(result)) if inspect.isawaitable(result) else result

    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run_agent")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)


def read_result(result: object, *, scored_later: bool = False) -> EpisodeResult:
    """Validate the result of run_agent; the reward may be None only if reward models score the episode later."""
    given = plain(result)
    named = given if isinstance(given, dict) else {"reward": given}
    reward = named.get("reward", named.get("rewards"))
    may_be_none = scored_later and named.keys() <= {"reward", "rewards", "scores", "extra_logs"}
    if reward is None and not may_be_none:
        raise RolloutError(f"run_agent returned {kind_of(given)}: {RESULT}")
    return {"reward": reward, "scores": named.get("scores"), "extra_logs": named.get("extra_logs")}
