"""Scorers of single-turn samples: a user's reward file in worker processes, or none if reward models score later.

`SingleTurn` calls a scorer once per group; `http.ServerRewards` is the scorer for reward servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from openrlhf.agents.executor import all_of
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.sandbox.process import Failure
from openrlhf.agents.scores import NOT_YET, Group, Scored, read_scores
from openrlhf.errors import RewardError, RolloutError


class Scorer(Protocol):
    """Source of rewards: returns a verdict or an error for each sample of a prompt, in order."""

    async def score(self, group: Group) -> Sequence[Scored | RewardError]: ...

    async def close(self) -> None: ...


class NoRewards:
    """Scorer for runs in which reward models score the samples later."""

    async def score(self, group: Group) -> list[Scored]:
        return [NOT_YET] * len(group.queries)

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class FileRewards:
    """Scorer that calls the reward_func of a .py file once per group.

    If that call fails, each sample is tried alone to find the cause. The samples that succeed alone are then scored
    again together, because a function may compare the samples it gets.
    """

    def __init__(self, pool: Pool, *, stop_at_failure: bool) -> None:
        self.pool = pool
        self.stop_at_failure = stop_at_failure
        self.source = f"reward_func in {pool.spec.file}"

    async def score(self, group: Group) -> Sequence[Scored | RewardError]:
        """Score the group together; after a failure, isolate the failing samples and score the rest again."""
        places = range(len(group.queries))
        together = await self._call(group)
        if not isinstance(together, Failure):
            return together
        alone = await all_of(self._alone(group.part([place])) for place in places)
        guilty = {place: error for place, error in enumerate(alone) if error is not None}
        innocent = [place for place in places if place not in guilty]
        if not innocent:
            return [guilty[place] for place in places]
        again = await self._call(group.part(innocent))
        if isinstance(again, Failure):
            error = reward_error(again, self.source, f"{len(innocent)} samples together, the first: {group.name(0)}")
            again = [error] * len(innocent)
        verdicts = dict(zip(innocent, again, strict=True)) | guilty
        return [verdicts[place] for place in places]

    async def _alone(self, one: Group) -> RewardError | None:
        """Score one sample alone; return its error, or raise it if the first failure stops the run."""
        outcome = await self._call(one)
        if not isinstance(outcome, Failure):
            return None
        error = reward_error(outcome, self.source, one.name(0))
        if self.stop_at_failure:
            raise error
        return error

    async def _call(self, group: Group) -> Sequence[Scored | RewardError] | Failure:
        """Call reward_func; return a Failure if it did not return, errors if its result is malformed."""
        count = len(group.queries)
        body = {
            "queries": list(group.queries),
            "prompts": [group.prompt.text] * count,
            "labels": [group.prompt.label] * count,
            "seed": group.seed,
        }
        try:
            reply = await self.pool.call(body, retries=0)
        except Failure as failure:
            return failure
        try:
            return read_scores(reply.result, group, self.source)
        except RewardError as error:
            return [RewardError(f"{error}; the first sample is {group.name(0)}")] * count

    async def close(self) -> None:
        await self.pool.close()


def reward_error(failure: Failure, source: str, sample: str) -> RewardError:
    """Convert a failure to an error that names source and sample, with the traceback as a note."""
    text = f"{failure.text}, for {sample}" if failure.is_ours else f"{source} {failure.text}, for {sample}"
    error = RewardError(text)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error


def episode_error(failure: Failure, source: str, sample: str) -> RewardError | RolloutError:
    """Convert a failure of an episode: RolloutError if the agent violated the interface, else RewardError."""
    error = reward_error(failure, source, sample)
    return RolloutError(error.message) if failure.kind == RolloutError.__name__ else error
