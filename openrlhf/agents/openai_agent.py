"""Agents written against OpenAI's client: `run_agent` gets an address and a key, and its conversation is the sample."""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat_episode import Episode, open_episode, refuse_rendered_prompts
from openrlhf.agents.chat_wire import find_calls
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.messages import plain
from openrlhf.agents.multi_turn import settled
from openrlhf.agents.scores import kind_of
from openrlhf.config.checks.extras import require
from openrlhf.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from openrlhf.agents.chat_server import ChatServer

OFFERED = ("base_url", "api_key", "prompt", "label", "session_id", "seed")
RESULT = "wanted is a number, or a dict with 'reward' (and 'scores', 'extra_logs')"


class OpenAIAgentExecutor(AgentExecutorBase):
    """Serves the policy at a base_url of its own for each episode; extend it with `run_agent`.

    `run_agent` may be async or not and use any client: it has a thread to itself. It names what it wants to know of
    base_url, api_key, prompt, label, session_id and seed, and returns the reward.
    """

    server: ChatServer

    @abstractmethod
    def run_agent(self, base_url: str, api_key: str, prompt: str, label: Any) -> Any:
        """The agent: asks the policy at base_url, and returns a reward or {reward, scores, extra_logs}."""

    def find_calls(self, text: str, number: int) -> tuple[str, list[dict[str, Any]]]:
        """The text of a turn without its tool calls, and the calls as OpenAI's clients know them.

        Understood is what Qwen and Hermes write: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. For a model
        that writes them otherwise, override this; the arguments are a dict.
        """
        return find_calls(text, number)

    async def prepare(self) -> None:
        require("aiohttp", "an agent with run_agent")
        self.wanted = wanted_by(self.run_agent)
        refuse_rendered_prompts(self, "run_agent")
        from openrlhf.agents.chat_server import HOST, ChatServer  # aiohttp

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
        """What run_agent returned. One that gives up because its episode has no room left has earned nothing."""
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
    """The executor of a file that has a function run_agent and no class."""

    class FunctionAgent(OpenAIAgentExecutor):
        run_agent = staticmethod(function)

    return FunctionAgent()


def without_proxy(host: str) -> None:
    """Clients in this process reach a host directly, whatever proxy the machine has."""
    known = {os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [*sorted(known), host]))


def wanted_by(function: Callable[..., Any]) -> list[str]:
    """Which of the offered arguments a run_agent takes, read from its signature."""
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
    result = function(**arguments)
    return asyncio.run(settled(result)) if inspect.isawaitable(result) else result


async def in_thread(work: Callable[[], Any]) -> Any:
    """A thread for each: in a pool, those that have a place could wait for the engine, and it for those without."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run_agent")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)


def read_result(result: Any, *, scored_later: bool = False) -> dict[str, Any]:
    """The verdict of a run_agent, with the keys of an episode; None where reward models score it later."""
    given = plain(result)
    if not isinstance(given, Mapping):
        given = {"reward": given}
    reward = given.get("reward", given.get("rewards"))
    left_out = scored_later and given.keys() <= {"reward", "rewards", "scores", "extra_logs"}
    if reward is None and not left_out:
        raise RolloutError(f"run_agent returned {kind_of(plain(result))}; {RESULT}")
    return {"reward": reward, "scores": given.get("scores"), "extra_logs": given.get("extra_logs")}
