"""Executor for the environments of GEM (package gem-llm).

The environment's observations are the user's messages, and the policy's turns are its actions. An agent file uses it by
`class AgentExecutor(GemAgentExecutor)`.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec
from typing import Any

from openrlhf.agents.chat.episode import Episode, Full, open_episode, refuse_rendered_prompts
from openrlhf.agents.chat.wire import ChatRequest
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.scores import kind_of
from openrlhf.data.messages import Message
from openrlhf.errors import ConfigError, RolloutError

PIP = "pip install gem-llm"
LEAST_REWARD = -1.0  # lower bound per episode, however many small penalties add up


class GemAgentExecutor(AgentExecutorBase):
    """Executor for GEM: the prompt names an environment, such as game:GuessTheNumber-v0-easy; the label is its seed.

    All samples of a prompt therefore play the same game. Turns go through the chat template. The reward is the sum of
    the environment's rewards, but at least -1.
    """

    async def prepare(self) -> None:
        if find_spec("gem") is None:
            raise ConfigError("GemAgentExecutor needs the package gem, which is not installed", try_this=PIP)
        refuse_rendered_prompts(self, "GemAgentExecutor")
        self.gem: Any = importlib.import_module("gem")

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        """Play one game, with the reward of each turn as a step reward."""
        game = self._make(prompt)
        episode = open_episode(self, sampling_params, max_length, hf_tokenizer, llm_engine)
        rewards, done = await play(game, read_seed(label), episode)
        ends = [end - 1 for _, end in episode.session.transcript.action_ranges]
        sample = episode.sample()
        return sample | {
            "prompt": prompt,
            "label": label,
            "reward": max(LEAST_REWARD, sum(rewards)),
            "extra_logs": {"turn_count": len(rewards)},
            "step_rewards": list(zip(ends, rewards, strict=True)),
            "truncated": sample["truncated"] or not done,
        }

    def _make(self, name: str) -> Any:
        """Create the environment; for an unknown name, suggest similar ones."""
        try:
            return self.gem.make(name)
        except ValueError as error:
            known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
            near = difflib.get_close_matches(name, known)
            raise RolloutError(
                f"a prompt must name an environment of GEM, and {name!r} is none ({error})",
                try_this=f"{' or '.join(near)}" if near else "gem.print_envs() for all names",
            ) from None


async def play(game: Any, seed: int, episode: Episode) -> tuple[list[float], bool]:
    """Play one game; return the reward of each turn and whether the game ended before the episode was full."""
    observation, _ = game.reset(seed=seed)
    messages: list[Message] = [{"role": "user", "content": observation}]
    rewards: list[float] = []
    done = False
    while not done:
        try:
            answer = await episode.answer(ChatRequest(messages))
        except Full:
            break
        observation, reward, terminated, cut, info = game.step(answer.message["content"])
        rewards.append(float(reward))
        done = bool(terminated or cut)
        hint = "\n".join(filter(None, [observation, info.get("suffix")]))
        messages = [*messages, answer.message, {"role": "user", "content": hint}]
    return rewards, done


def read_seed(label: Any) -> int:
    """Parse the seed of a game from the label of its prompt."""
    try:
        return int(label)
    except (TypeError, ValueError):
        raise RolloutError(
            f"the label of a prompt for GEM is {kind_of(label)}; expected a whole number, the seed of its game:"
            " give each row one, and name the field by --label_key"
        ) from None
