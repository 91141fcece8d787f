"""Interface between the RL loop, which owns prompts and engines, and executors, which turn prompts into scored samples.

The loop calls `GroupExecutor.run_group` with a prompt and one engine session per sample; `SingleTurnSamples` and
`AgentEpisodes` implement it, and `ReportingExecutor` reports the samples that they skip. The functions format
samples for error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from openrlhf.agents.branches import last_of_episodes
from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion, Prompt, Request, SamplingParams, Trajectory

SampleError: TypeAlias = RewardError | RolloutError
OnError: TypeAlias = Literal["stop", "skip"]  # --on_reward_error
SHOWN = 160  # maximum characters to quote in a message
GROWTH = 4  # report skipped samples again each time their number has grown by this factor


class Session(Protocol):
    """One episode's access to the policy, one request at a time; close it after the last request."""

    async def generate(self, request: Request) -> Completion: ...

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


@dataclass
class ReportingExecutor:
    """GroupExecutor that forwards its calls to `inner` and reports skipped samples.

    The first error is printed immediately, then the count at growing intervals: a run whose reward always fails would
    otherwise look like a slow run.
    """

    inner: GroupExecutor
    tell: Callable[[str], None]  # prints a line
    samples: int = 0  # finished samples, including failed ones
    failures: int = 0
    report_at: int = 1  # number of failures at which to report again
    first: str = ""  # the first error

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        result = await self.inner.run_group(prompt, params, sessions)
        self.samples += len(last_of_episodes(result.trajectories)) + len(result.failures)
        for failure in result.failures:
            self.failures += 1
            text = " ".join(str(failure).split())  # on one line
            self.first = self.first or text
            if self.failures == self.report_at:
                self.report_at *= GROWTH
                single = f"a sample failed and is skipped (--on_reward_error skip): {text}"
                self.tell(single if self.failures == 1 else f"{self.summary}, the latest: {text}")
        return result

    @property
    def summary(self) -> str:
        return f"{self.failures} of {self.samples} samples failed and were skipped (--on_reward_error skip)"

    async def close(self) -> None:
        await self.inner.close()


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
