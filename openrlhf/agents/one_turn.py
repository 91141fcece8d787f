"""Single-turn executor for agent files: one generation, then its reward.

It is the counterpart of `single_turn.SingleTurn` that runs in a worker process and that users may extend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openrlhf.agents.http import Server
from openrlhf.agents.interface import AgentExecutorBase, LLMEngine
from openrlhf.agents.loading import RewardCall, adapt_reward, find_reward, load_module
from openrlhf.agents.multi_turn import begin, settled
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import NOT_YET, Group, Scored, read_scores
from openrlhf.errors import RewardError
from openrlhf.types import Prompt

SERVER_TIMEOUT = 180.0  # seconds


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Executor that generates one response and scores it.

    `remote_rm_url` is a reward_func, the path of a .py file with one, or the address of a reward server. Without it,
    reward models must score the sample later.
    """

    def __init__(self, remote_rm_url: Callable[..., Any] | str | None = None) -> None:
        self.reward = reward_call(remote_rm_url)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        """Generate one response to the prompt and score it."""
        talk = begin(prompt, hf_tokenizer, max_length, sampling_params.max_tokens)
        prompt_length = len(talk.tokens)
        action = (await llm_engine.generate(list(talk.tokens), sampling_params)).outputs[0]
        talk.act(action)
        query = hf_tokenizer.decode(talk.tokens)
        group = Group(Prompt(0, prompt, tuple(talk.tokens[:prompt_length]), label), (query,), (action.text,))
        scored = await self._scored(group)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": talk.tokens,
            "action_ranges": talk.action_ranges,
            "rollout_log_probs": talk.log_probs,
            "reward": None if scored is NOT_YET else scored.reward,
            "scores": None if scored is NOT_YET else scored.score,
            "extra_logs": dict(scored.extra_logs),
            "truncated": action.finish_reason == "length",
        }

    async def _scored(self, group: Group) -> Scored:
        """Score the one sample of `group`; NOT_YET if reward models do it later."""
        if self.reward is None:
            if not self.scored_later:
                raise RewardError(
                    "SingleTurnAgentExecutor was made without a reward",
                    try_this="SingleTurnAgentExecutor(reward_func), or --reward_pretrain for a model that scores",
                )
            return NOT_YET
        result = plain(await settled(self.reward(list(group.queries), [group.prompt.text], [group.prompt.label])))
        (scored,) = read_scores(result, group, "the reward")
        if isinstance(scored, RewardError):
            raise scored
        return scored


def reward_call(given: Callable[..., Any] | str | None) -> RewardCall | None:
    """Turn a function, a file or a server address into a call with (queries, prompts, labels)."""
    if given is None:
        return None
    if callable(given):
        return adapt_reward(given, "the agent's file")
    if given.endswith(".py"):
        return find_reward(load_module(given), given)
    server = Server(given, SERVER_TIMEOUT)
    return lambda queries, prompts, labels: server.ask({"query": queries, "prompts": prompts, "labels": labels})
