"""Interface between the RL loop, which owns prompts and engines, and executors, which turn prompts into scored samples.

The loop calls `GroupExecutor.run_group` with a prompt and one engine session per sample; `SingleTurnSamples` and
`AgentEpisodes` implement it. The functions format samples for error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion, Prompt, Request, SamplingParams, Trajectory

SampleError: TypeAlias = RewardError | RolloutError
OnError: TypeAlias = Literal["stop", "skip"]  # --on_reward_error
SHOWN = 160  # maximum characters to quote in a message


class Session(Protocol):
    """One episode's access to the policy, one request at a time; close it after the last request."""

    async def generate(self, request: Request, *, last: bool = False) -> Completion:
        """Return the completion of a request; if it is the last one, close the session."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupResult:
    """The samples of a prompt, in order, and the errors of the missing ones. A sample may have several trajectories.

    Reward and score are NaN if reward models score the samples later. Failures occur only with --on_reward_error skip.
    """

    trajectories: list[Trajectory]
    failures: list[SampleError] = field(default_factory=list)


class GroupExecutor(Protocol):
    """Interface of an object that runs all samples of a prompt."""

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        """Run one sample for each entry of `params`, using the session at the same index; close every session."""
        ...

    async def close(self) -> None:
        """End all processes that were started; may be called more than once."""
        ...


def clip(text: str, limit: int = SHOWN) -> str:
    """Return the text; if it is longer than `limit`, return only its beginning and end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def shorten(text: str, limit: int = SHOWN) -> str:
    """Return the clipped text in quotes, on one line."""
    return repr(clip(text, limit))


def sample_name(prompt: Prompt, response: str | None = None, *, sample: int | None = None) -> str:
    """Describe a sample for an error message."""
    number = "" if sample is None else f"sample {sample} of "
    answer = "" if response is None else f", response {shorten(response)}"
    return f"{number}prompt {prompt.index} {shorten(prompt.text)}{answer}"
