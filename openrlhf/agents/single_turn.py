"""Executor for single-turn samples: one prompt, one response, one reward.

The samples of a group are generated concurrently and scored in one call by `FileRewards` or `ServerRewards`, perhaps
together with other groups. Without either, reward models score the samples later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrlhf.agents.executor import GroupResult, OnError, Session
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.agents.node_pools import RemotePool
from openrlhf.agents.rewards import FileRewards, ServerRewards
from openrlhf.agents.scores import NOT_SCORED, Samples, Scored
from openrlhf.agents.trajectory import join_turn
from openrlhf.errors import RewardError
from openrlhf.types import Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SingleTurnSamples:
    """GroupExecutor that generates the responses of a prompt and scores them together."""

    rewards: FileRewards | ServerRewards | None
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    on_error: OnError

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        """Generate all responses, then score them together."""
        completions = await gather_or_cancel(
            session.generate(Request(prompt.input_ids, sample), last=True)
            for session, sample in zip(sessions, params, strict=True)
        )
        scores: list[Scored | RewardError] = [NOT_SCORED] * len(completions)
        if self.rewards is not None:
            sampled = [item.token_ids.tolist() for item in completions]
            responses = [str(self.tokenizer.decode(ids)) for ids in sampled]
            queries = [str(self.tokenizer.decode([*prompt.input_ids, *ids])) for ids in sampled]
            # Reward functions cut the prompt off, so a query begins with it even if its tokens decode to another text.
            for place, response in enumerate(responses):
                if not queries[place].startswith(prompt.text):
                    queries[place] = prompt.text + response
            samples = Samples((prompt,) * len(completions), tuple(queries), tuple(responses), params[0].seed)
            scores = await self.rewards.score(samples)
        result = GroupResult([])
        for completion, scored in zip(completions, scores, strict=True):
            if not isinstance(scored, RewardError):
                result.trajectories.append(join_turn(prompt, completion, self.context_length, scored))
            elif self.on_error == "stop":
                raise scored
            else:
                result.failures.append(scored)
        return result

    async def add_pools(self, pools: Sequence[RemotePool]) -> None:
        """Also run the reward function on other nodes."""
        if isinstance(self.rewards, FileRewards):
            await self.rewards.add_pools(pools)

    async def close(self) -> None:
        """End the processes of a reward file."""
        if isinstance(self.rewards, FileRewards):
            await self.rewards.pool.close()
