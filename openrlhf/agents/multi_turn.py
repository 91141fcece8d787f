"""Executor for multi-turn episodes: the policy acts, the environment responds, until it is done or a limit is reached.

`MultiTurnAgentExecutor` runs the loop around a user's `AgentInstanceBase`. Other executors share `Transcript`, which
collects the tokens and rewards of an episode, and the helpers that check what user code returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentExecutorBase, CompletionOutput, LLMEngine
from openrlhf.agents.loading import make
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import kind_of, read_logs, read_number
from openrlhf.errors import RolloutError
from openrlhf.monitor import say

AGENT = "the agent's step"


@dataclass
class Transcript:
    """The episode so far. Actions keep the sampled ids; feedback is tokenised separately.

    `tokens` and `log_probs` have the same length; log-probs are 0.0 outside actions.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    action_ranges: list[tuple[int, int]] = field(default_factory=list)
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    reward: float = 0.0
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)

    def act(self, action: CompletionOutput) -> None:
        """Append a turn of the policy."""
        start = len(self.tokens)
        self.tokens += action.token_ids
        self.log_probs += [place[token].logprob for token, place in zip(action.token_ids, action.logprobs, strict=True)]
        if action.token_ids:
            self.action_ranges.append((start, len(self.tokens)))
        self.text += action.text

    def feed(self, feedback: str, token_ids: list[int]) -> None:
        """Append tokens of the environment, which are not trained on."""
        self.text += feedback
        self.tokens += token_ids
        self.log_probs += [0.0] * len(token_ids)

    def credit(self, result: Mapping[str, Any]) -> None:
        """Record the result of a step: sum up rewards; keep the latest scores and extra_logs."""
        reward = read_number(plain(result.get("rewards")), f"'rewards' of {AGENT}")
        self.reward += reward
        if self.action_ranges:
            self.step_rewards.append((self.action_ranges[-1][1] - 1, reward))
        if result.get("scores") is not None:
            self.score = read_number(plain(result["scores"]), f"'scores' of {AGENT}")
        if result.get("extra_logs") is not None:
            self.extra_logs = read_logs(plain(result["extra_logs"]), AGENT)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Executor of an AgentInstanceBase, with a new instance for each sample."""

    def __init__(self, agent_instance_cls: Callable[[], Any]) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        """Alternate between generation and `step` until done, the context is full, or max_turns is reached."""
        instance = await make(self.agent_instance_cls)
        observation = read_observation(await settled(instance.reset({"observation": prompt, "label": label})))
        talk = begin(observation, hf_tokenizer, max_length, sampling_params.max_tokens)
        done, turns, finish_reason = False, 0, "stop"
        while not done and len(talk.tokens) < max_length and turns != self.max_turns:
            before = talk.text
            action = (await llm_engine.generate(list(talk.tokens), sampling_params)).outputs[0]
            finish_reason = action.finish_reason
            talk.act(action)
            states = {"observation_text": before, "action_text": action.text, "label": label}
            result = read_step(await settled(instance.step(states | {"sampling_params": sampling_params})))
            talk.credit(result)
            done, turns = bool(result["done"]), turns + 1
            feedback = result.get("environment_feedback") or ""
            talk.feed(feedback, tokenise(feedback, hf_tokenizer))
            sampling_params = result.get("sampling_params") or sampling_params
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": talk.tokens,
            "action_ranges": talk.action_ranges,
            "rollout_log_probs": talk.log_probs,
            "reward": talk.reward,
            "scores": talk.reward if talk.score is None else talk.score,
            "extra_logs": talk.extra_logs,
            "truncated": not done or finish_reason == "length",
            "step_rewards": talk.step_rewards,
        }


def begin(observation: str, tokenizer: Any, max_length: int, max_tokens: int | None) -> Transcript:
    """Start a transcript with the first observation; cut its beginning if it leaves too little room for an answer."""
    tokens = tokenise(observation, tokenizer)
    if not tokens:
        raise RolloutError("the first observation is empty, so there is nothing to continue")
    budget = max(1, max_length - (max_tokens or 1))
    if len(tokens) > budget:
        say(f"an observation of {len(tokens)} tokens keeps its last {budget}: {shorten(observation, 60)}")
        tokens = tokens[-budget:]
    return Transcript(observation, tokens, [0.0] * len(tokens))


def tokenise(text: str, tokenizer: Any) -> list[int]:
    """Tokenise a piece of an episode, without adding special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


async def settled(result: Any) -> Any:
    """Await the result of a user's method if it is async, else return it."""
    return await result if inspect.isawaitable(result) else result


def read_observation(result: Any) -> str:
    """Validate the result of `reset` and return its observation."""
    observation = result.get("observation") if isinstance(result, Mapping) else None
    if not isinstance(observation, str):
        raise RolloutError(f"the agent's reset returned {kind_of(result)}; expected a dict with 'observation', a text")
    return observation


def read_step(result: Any) -> Mapping[str, Any]:
    """Validate the result of `step`; raise RolloutError naming what is wrong."""
    if not isinstance(result, Mapping):
        raise RolloutError(f"{AGENT} returned {kind_of(result)}; expected a dict with 'rewards' and 'done'")
    missing = [key for key in ("rewards", "done") if key not in result]
    if missing:
        raise RolloutError(f"{AGENT} returned a dict without {' and '.join(missing)}; its keys are {list(result)}")
    if result.get("environment_images"):
        raise RolloutError(
            f"{AGENT} returned 'environment_images', but models are trained on text: describe them in words"
        )
    feedback = result.get("environment_feedback")
    if not isinstance(feedback, str | None):
        raise RolloutError(f"'environment_feedback' of {AGENT} is {kind_of(feedback)}, not a text")
    return result
