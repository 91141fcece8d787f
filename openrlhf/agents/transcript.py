"""The tokens of one episode, collected turn by turn while it runs in a worker process.

Executors append the policy's turns and the environment's feedback to a `Transcript` and return it as the result of the
episode. Turns keep the sampled token ids, and feedback is tokenised once, when it arrives. Training therefore uses
exactly the tokens that the policy read and sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import CompletionOutput, EpisodeResult, EpisodeTask
from openrlhf.errors import RolloutError
from openrlhf.monitor import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Transcript:
    """The episode so far; `tokens` and `log_probs` have the same length."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0.0 outside actions
    action_ranges: list[tuple[int, int]] = field(default_factory=list)  # half-open token ranges of the policy's turns

    @classmethod
    def begin(cls, observation: str, task: EpisodeTask) -> Transcript:
        """Start with the first observation; truncate its start if it leaves too few tokens for a turn."""
        tokens = tokenise(observation, task.tokenizer)
        if not tokens:
            raise RolloutError("the first observation is empty: expected at least one token to continue")
        budget = max(1, task.max_length - (task.sampling_params.max_tokens or 1))
        if len(tokens) > budget:
            say(f"an observation of {len(tokens)} tokens is truncated to its last {budget}: {shorten(observation, 60)}")
            tokens = tokens[-budget:]
        return cls(observation, tokens, [0.0] * len(tokens))

    def add_turn(self, output: CompletionOutput) -> None:
        """Append a turn of the policy."""
        start = len(self.tokens)
        self.tokens += output.token_ids
        self.log_probs += [known[token].logprob for token, known in zip(output.token_ids, output.logprobs, strict=True)]
        if output.token_ids:
            self.action_ranges.append((start, len(self.tokens)))
        self.text += output.text

    def add_feedback(self, text: str, token_ids: list[int]) -> None:
        """Append feedback of the environment, which is not trained on."""
        self.text += text
        self.tokens += token_ids
        self.log_probs += [0.0] * len(token_ids)

    def result(self, *, truncated: bool) -> EpisodeResult:
        """Return the episode as a result of `execute`, without the reward."""
        return {
            "observation_tokens": self.tokens,
            "action_ranges": self.action_ranges,
            "rollout_log_probs": self.log_probs,
            "truncated": truncated,
        }


def tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenise text of an episode, without adding special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
