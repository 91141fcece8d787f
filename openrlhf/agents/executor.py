"""Interface between the RL loop, which owns prompts and engines, and executors, which turn prompts into scored samples.

The loop calls `GroupExecutor.run_group` with a prompt and one engine session per sample; `SingleTurn` and `Episodes`
implement it. The rest are helpers for running a group and naming samples in messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar

from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion, Prompt, Request, SamplingParams, Trajectory

SampleError: TypeAlias = RewardError | RolloutError
OnError: TypeAlias = Literal["stop", "skip"]
Item = TypeVar("Item")
SHOWN = 160  # most characters of a text in a message


class Session(Protocol):
    """One episode's access to the policy: one request at a time; closed after the last request."""

    async def generate(self, request: Request) -> Completion: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupResult:
    """The samples of a prompt, in order, and the errors of the missing ones.

    Reward and score are NaN if a reward model scores later. Failures occur only with --on_reward_error skip.
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


def settle(outcomes: Iterable[Trajectory | SampleError], on_error: OnError) -> GroupResult:
    """Collect the outcomes of a group; raise the first failure unless failures are skipped."""
    result = GroupResult([])
    for outcome in outcomes:
        if isinstance(outcome, Trajectory):
            result.trajectories.append(outcome)
        elif on_error == "stop":
            raise outcome
        else:
            result.failures.append(outcome)
    return result


async def all_of(coroutines: Iterable[Coroutine[object, object, Item]]) -> list[Item]:
    """Run all coroutines and return their results in order; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def clip(text: str, limit: int = SHOWN) -> str:
    """Return the text, or the beginning and end of a long one."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def shorten(text: str, limit: int = SHOWN) -> str:
    """Return the clipped text in quotes, on one line."""
    return repr(clip(text, limit))


def sample_name(prompt: Prompt, response: str | None = None, *, sample: int | None = None) -> str:
    """Describe a sample for a message."""
    number = "" if sample is None else f"sample {sample} of "
    answer = "" if response is None else f", response {shorten(response)}"
    return f"{number}prompt {prompt.index} {shorten(prompt.text)}{answer}"
