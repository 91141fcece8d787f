"""The contract between the loop, which owns prompts and engines, and whatever turns a prompt into scored samples."""

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
SHOWN = 160  # characters of a text in a message


class Session(Protocol):
    """The policy as one episode sees it: one request at a time, closed when the episode asks for nothing more."""

    async def generate(self, request: Request) -> Completion: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupResult:
    """The samples of a prompt, in order, and what became of those that are missing.

    Reward and score are NaN where a reward model scores later; failures come only with --on_reward_error skip.
    """

    trajectories: list[Trajectory]
    failures: list[SampleError] = field(default_factory=list)


class GroupExecutor(Protocol):
    """Runs all samples of a prompt."""

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        """One sample for each entry of `params`, through the session at its place; closes every session."""
        ...

    async def close(self) -> None:
        """Ends every process that was started; may be called twice."""
        ...


def settle(outcomes: Iterable[Trajectory | SampleError], on_error: OnError) -> GroupResult:
    """A group of what came out well; the first failure is raised unless failures are skipped."""
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
    """All results in order; when one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def clip(text: str, limit: int = SHOWN) -> str:
    """A text; of a long one the beginning and the end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def shorten(text: str, limit: int = SHOWN) -> str:
    """A clipped text in quotes, on one line."""
    return repr(clip(text, limit))


def sample_name(prompt: Prompt, response: str | None = None, *, sample: int | None = None) -> str:
    """Which sample a message is about."""
    number = "" if sample is None else f"sample {sample} of "
    answer = "" if response is None else f", response {shorten(response)}"
    return f"{number}prompt {prompt.index} {shorten(prompt.text)}{answer}"
