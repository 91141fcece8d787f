"""Executor for agents that use OpenAI's client.

`run_agent` gets a base_url and a key, talks to the policy as to any OpenAI-compatible server, and returns the reward.
Its conversation is the training sample. The server runs in the same worker process (`chat_server`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat.episode import Episode, open_episode, refuse_rendered_prompts
from openrlhf.agents.chat.wire import find_calls
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.multi_turn import settled
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import kind_of
from openrlhf.config.checks.extras import require
from openrlhf.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from openrlhf.agents.chat.server import ChatServer

OFFERED = ("base_url", "api_key", "prompt", "label", "session_id", "seed")
RESULT = "expected a number, or a dict with 'reward' (and 'scores', 'extra_logs')"


class OpenAIAgentExecutor(AgentExecutorBase):
    """Executor that serves the policy at a separate base_url for each episode; extend it with `run_agent`.

    `run_agent` may be async or not and may use any client, because it runs in its own thread. Its signature names the
    arguments it gets, out of base_url, api_key, prompt, label, session_id and seed; it returns the reward.
    """

    server: ChatServer

    @abstractmethod
    def run_agent(self, base_url: str, api_key: str, prompt: str, label: Any) -> Any:
        """Run the agent against the policy at base_url; return a reward or {reward, scores, extra_logs}."""

    def find_calls(self, text: str, number: int) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a turn without its tool calls, and the calls in the format of OpenAI's clients.

        The default parses the format of Qwen and Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
        Override this for a model with another format; return the arguments of a call as a dict.
        """
        return find_calls(text, number)

    async def prepare(self) -> None:
        """Check run_agent and the flags, and start the server."""
        require("aiohttp", "an agent with run_agent")
        self.wanted = wanted_by(self.run_agent)
        refuse_rendered_prompts(self, "run_agent")
        from openrlhf.agents.chat.server import HOST, ChatServer  # imports aiohttp, an extra

        without_proxy(HOST)
        self.server = ChatServer()
        await self.server.start()

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        """Serve one episode while run_agent runs; return its conversation with the agent's reward."""
        episode = open_episode(self, sampling_params, max_length, hf_tokenizer, llm_engine, self.find_calls)
        known = {
            "base_url": self.server.open(episode),
            "api_key": episode.key,
            "prompt": prompt,
            "label": label,
            "session_id": episode.name,
            "seed": getattr(llm_engine, "seed", 0),
        }
        try:
            result = await self._outcome(episode, {name: known[name] for name in self.wanted})
        finally:
            self.server.close(episode)
        if not episode.drawn:
            raise RolloutError("run_agent returned before it asked the policy anything at base_url with its api_key")
        return (
            {"prompt": prompt, "label": label} | episode.sample() | read_result(result, scored_later=self.scored_later)
        )

    async def _outcome(self, episode: Episode, arguments: dict[str, Any]) -> Any:
        """Run the agent and return its result; the reward is 0 if it raises because the episode is full.

        An error in serving its requests takes precedence over its result and its own exceptions.
        """
        try:
            result = await in_thread(lambda: called(self.run_agent, arguments))
        except Exception as error:
            if episode.trouble is not None:
                raise episode.trouble from error
            if not episode.full:
                raise
            return 0.0
        if episode.trouble is not None:
            raise episode.trouble
        return result


def executor_around(function: Callable[..., Any]) -> OpenAIAgentExecutor:
    """Return the executor for a file with a function run_agent instead of a class."""

    class FunctionAgent(OpenAIAgentExecutor):
        run_agent = staticmethod(function)

    return FunctionAgent()


def without_proxy(host: str) -> None:
    """Make clients in this process reach a host directly, whatever proxy the environment sets."""
    known = {os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [*sorted(known), host]))


def wanted_by(function: Callable[..., Any]) -> list[str]:
    """Return the offered arguments that a run_agent takes, according to its signature."""
    parameters = inspect.signature(function).parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return list(OFFERED)
    unknown = [item.name for item in parameters if item.name not in OFFERED and item.default is item.empty]
    if unknown:
        raise ConfigError(
            f"run_agent{inspect.signature(function)} wants {', '.join(unknown)}; it may name {', '.join(OFFERED)}",
            try_this="async def run_agent(base_url, api_key, prompt, label): ...",
        )
    return [item.name for item in parameters if item.name in OFFERED]


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function; run an async one on an event loop of this thread."""
    result = function(**arguments)
    return asyncio.run(settled(result)) if inspect.isawaitable(result) else result


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a new thread.

    A bounded pool could deadlock: its agents wait for the engine, while the engine's batch waits for queued agents.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run_agent")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)


def read_result(result: Any, *, scored_later: bool = False) -> dict[str, Any]:
    """Validate the result of run_agent; the reward may be None only if reward models score the episode later."""
    given = plain(result)
    if not isinstance(given, Mapping):
        given = {"reward": given}
    reward = given.get("reward", given.get("rewards"))
    left_out = scored_later and given.keys() <= {"reward", "rewards", "scores", "extra_logs"}
    if reward is None and not left_out:
        raise RolloutError(f"run_agent returned {kind_of(plain(result))}; {RESULT}")
    return {"reward": reward, "scores": given.get("scores"), "extra_logs": given.get("extra_logs")}
