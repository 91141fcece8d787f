"""Executor for ordinary samples: one prompt, one response, one reward.

The samples of a group are generated concurrently and scored in one call. No user code runs here: a `Scorer` passes the
texts to a reward file or server, or leaves the scoring to reward models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from openrlhf.agents.executor import GroupResult, OnError, Session, all_of, settle
from openrlhf.agents.rewards import Scorer
from openrlhf.agents.scores import Group, Scored
from openrlhf.agents.trajectory import one_turn
from openrlhf.errors import RewardError
from openrlhf.types import Completion, Prompt, Request, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SingleTurn:
    """GroupExecutor that generates the responses of a prompt and scores them in one call."""

    def __init__(
        self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, *, context_length: int, on_error: OnError
    ) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.on_error: OnError = on_error

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        """Generate all responses, then score them in one call."""
        completions = await all_of(
            self._generate(prompt, item, session) for item, session in zip(params, sessions, strict=True)
        )
        group = Group(
            prompt,
            queries=tuple(self._text((*prompt.input_ids, *item.token_ids)) for item in completions),
            responses=tuple(self._text(item.token_ids) for item in completions),
            seed=params[0].seed,
        )
        verdicts = await self.scorer.score(group)
        return settle(map(self._sample, [prompt] * len(verdicts), completions, verdicts), self.on_error)

    async def close(self) -> None:
        await self.scorer.close()

    async def _generate(self, prompt: Prompt, params: SamplingParams, session: Session) -> Completion:
        try:
            return await session.generate(Request(prompt.input_ids, params))
        finally:
            session.close()

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _sample(
        self, prompt: Prompt, completion: Completion, verdict: Scored | RewardError
    ) -> Trajectory | RewardError:
        """Combine a completion and its verdict into a trajectory; pass on an error."""
        if isinstance(verdict, RewardError):
            return verdict
        sample = one_turn(prompt, completion, self.context_length)
        return replace(sample, reward=verdict.reward, score=verdict.score, extra_logs=verdict.extra_logs)
