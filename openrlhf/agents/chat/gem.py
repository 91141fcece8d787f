"""Executor for the environments of GEM (package gem-llm).

The environment's observations are the user messages, and the policy's turns are the actions. Agent files use it with
`class AgentExecutor(GemAgentExecutor)`.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec
from typing import Any

from openrlhf.agents.chat.episode import ChatExecutor, EpisodeFull
from openrlhf.agents.chat.wire import ChatRequest
from openrlhf.agents.interface import EpisodeResult, EpisodeTask
from openrlhf.agents.scores import kind_of
from openrlhf.data.messages import Message
from openrlhf.errors import ConfigError, RolloutError

PIP = "pip install gem-llm"
LEAST_REWARD = -1.0  # lower bound of an episode's reward, even if many small penalties add up


class GemAgentExecutor(ChatExecutor):
    """Executor for GEM: the prompt names an environment, such as game:GuessTheNumber-v0-easy; the label is its seed.

    All samples of a prompt therefore play the same game. Turns are rendered with the chat template. The reward is the
    sum of the environment's rewards, but at least -1.
    """

    async def prepare(self) -> None:
        """Import GEM."""
        if find_spec("gem") is None:
            raise ConfigError("GemAgentExecutor needs the package gem, which is not installed", try_this=PIP)
        await super().prepare()
        self.gem: Any = importlib.import_module("gem")

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Play one game; the reward of each turn becomes a step reward."""
        game = self._make_game(task.prompt)
        episode = self.open_chat(task)
        try:
            seed = int(task.label)
        except (TypeError, ValueError, OverflowError):
            raise RolloutError(
                f"the label of a prompt for GEM is {kind_of(task.label)}: expected a whole number, the seed of a game",
                try_this="--label_key with the field that holds the seed",
            ) from None

        observation, _ = game.reset(seed=seed)
        messages: list[Message] = [{"role": "user", "content": observation}]
        rewards: list[float] = []
        done = False
        while not done:
            try:
                turn = await episode.answer(ChatRequest(messages))
            except EpisodeFull:
                break
            observation, reward, terminated, cut_off, info = game.step(turn.message["content"])
            rewards.append(float(reward))
            done = bool(terminated or cut_off)
            hint = "\n".join(filter(None, [observation, info.get("suffix")]))
            messages = [*messages, turn.message, {"role": "user", "content": hint}]

        result = episode.result()
        last_tokens = [end - 1 for _, end in episode.transcript.action_ranges]
        return {
            **result,
            "reward": max(LEAST_REWARD, sum(rewards)),
            "extra_logs": {"turn_count": len(rewards)},
            "step_rewards": list(zip(last_tokens, rewards, strict=True)),
            "truncated": result.get("truncated", False) or not done,
        }

    def _make_game(self, name: str) -> Any:
        """Create the environment; for an unknown name, suggest similar ones."""
        try:
            return self.gem.make(name)
        except ValueError as error:
            known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
            near = difflib.get_close_matches(name, known)
            raise RolloutError(
                f"unknown GEM environment: expected a registered name as the prompt, got {name!r} ({error})",
                try_this=" or ".join(near) if near else "gem.print_envs() for all names",
            ) from None
