"""A stream of groups: as many in progress as the open rollouts still need, and the next prompt for each rejected one.

A rollout is open from the moment it may begin until it is taken; several may be open (`GroupStream.open_rollouts`).

                 start                finish                  reward models
      prompts ----------> running ------------> unscored ----------------------> accepted ----> rollouts
         ^                   |                                  |                   |
         |                   | aborted                          | rejected:         | too old
         +------ again <-----+                                  v the next prompt   |
                   ^                                                                |
                   +----------------------------------------------------------------+

With --dynamic_filtering, reward models score all groups that have finished by the time the models are free.

By default, rollouts are cut from the accepted groups in prompt order, so their samples do not depend on which group
finished first. With oversampling (--vllm_generate_batch_size above --rollout_batch_size), a rollout is complete as soon
as enough groups are accepted. The surplus, finished or running, is left to the next rollout. A checkpoint stores
finished groups (`StreamState`); prompts of unfinished ones are drawn again after a resume.

In lockstep, groups run in rounds: the next ones start when all others have ended, and a round is scored in one call.
The engine then gets the same batches in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from openrlhf.agents.executor import GroupResult
from openrlhf.errors import RolloutError
from openrlhf.event_loop import cancel_all
from openrlhf.types import NOT_SAMPLED, Prompt, Trajectory

GroupSamples: TypeAlias = list[Trajectory]  # the samples of one prompt; at least one


@dataclass
class StreamState:
    """Prompts that a stream has drawn but not finished; part of a checkpoint.

    Each prompt before `drawn` is in one of these lists, or it is done: rejected, or part of a rollout.
    """

    drawn: int = 0  # position in the prompt order of the first prompt that was never drawn
    running: list[int] = field(default_factory=list)  # positions of prompts in progress
    again: list[int] = field(default_factory=list)  # positions of prompts to draw again, before new ones
    accepted: list[GroupSamples] = field(default_factory=list)  # groups that wait for their rollout

    @property
    def unfinished(self) -> list[int]:
        """Positions of the prompts that a resumed run draws again."""
        return sorted(self.running + self.again)

    @property
    def done(self) -> int:
        """Number of prompts that are done."""
        return self.drawn - len(self.running) - len(self.again) - len(self.accepted)


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Settings of a stream: how many groups run, how a rollout is cut, and which groups are dropped."""

    size: int  # groups of a rollout
    surplus: int = 0  # groups in progress beyond those that the open rollouts need (oversampling)
    most_running: int | None = None
    in_rounds: bool = False  # start groups only when no other runs
    aborts: bool = False  # abort groups that still run when their rollout is complete
    max_staleness: int | None = None  # in weight versions, when a group is trained


@dataclass
class StreamCounts:
    """Counts of events since the last rollout was cut."""

    kept: int = 0  # groups
    rejected: int = 0  # groups
    failures: int = 0  # samples that failed and were skipped
    aborted: int = 0  # groups
    stale: int = 0  # groups


class PromptSource(Protocol):
    """The prompts of a run in their order."""

    def __len__(self) -> int: ...

    def take(self, start: int, count: int) -> list[Prompt]: ...


@dataclass(frozen=True)
class RunningGroup:
    """A group in progress, and the last rollout that was open when it started."""

    result: asyncio.Future[GroupResult]
    last_open: int


class GroupStream:
    """Runs, scores and judges groups, and cuts rollouts from the accepted ones."""

    def __init__(
        self,
        prompts: PromptSource,
        state: StreamState,
        limits: StreamLimits,
        *,
        run: Callable[[Prompt], Coroutine[object, object, GroupResult]],
        score: Callable[[Sequence[Trajectory]], Awaitable[list[Trajectory]]] | None,  # None: not needed to judge
        is_kept: Callable[[Sequence[Trajectory]], bool],
    ) -> None:
        self.prompts, self.state, self.limits = prompts, state, limits
        self.run, self.score, self.is_kept = run, score, is_kept
        self.next = 0  # number of the next rollout to cut
        self.last_open = -1
        self.counts = StreamCounts()
        self.running: dict[int, RunningGroup] = {}  # groups by position, including those that are not judged yet
        self.unscored: dict[int, GroupSamples] = {}  # by position
        self.scoring: asyncio.Future[list[Trajectory]] | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self.changed = asyncio.Event()

    def open_rollouts(self, first: int, last: int) -> None:
        """Let the rollouts from `first`, the next to be taken, to `last` begin."""
        self.next, self.last_open = first, last
        self._start_groups()

    async def take(self, number: int) -> tuple[list[GroupSamples], StreamCounts]:
        """Return the groups of rollout `number` in prompt order; fewer than its size if the prompts run out."""
        self.next = number
        self.last_open = max(self.last_open, number)
        while True:
            if self.failure is not None:
                raise self.failure
            self._drop_stale()
            if not self._is_full():
                self._start_groups()
            if self._is_full() or not self.running:  # the latter if the prompts have run out
                if late := self._stragglers():
                    self.counts.aborted += len(late)
                    await self._abort(late)
                    continue
                return self._cut(), self._reset_counts()
            self.changed.clear()
            await self.changed.wait()

    async def close(self) -> None:
        """Cancel all groups in progress and start no more; a resumed run would draw their prompts again."""
        self.closed = True
        if self.scoring is not None:
            self.scoring.cancel()
        await self._abort(list(self.running))

    def _start_groups(self) -> None:
        """Start as many groups as the open rollouts still need and the limits permit."""
        limits, state = self.limits, self.state
        num_open = self.last_open - self.next + 1
        if self.closed or num_open < 1 or (limits.in_rounds and self.running):
            return
        room = num_open * limits.size + limits.surplus - len(self.running) - len(state.accepted)
        if limits.most_running is not None:
            room = min(room, limits.most_running - len(self.running))
        for _ in range(room):
            if state.again:
                position = state.again.pop(0)
            elif state.drawn < len(self.prompts):
                position = state.drawn
                state.drawn += 1
            else:
                return
            (prompt,) = self.prompts.take(position, 1)
            group = RunningGroup(asyncio.ensure_future(self.run(prompt)), self.last_open)
            state.running.append(position)
            self.running[position] = group
            group.result.add_done_callback(partial(self._finish, position))

    def _finish(self, position: int, ended: asyncio.Future[GroupResult]) -> None:
        """Pass the samples of a group on to scoring, or keep its error for `take`."""
        group = self.running.get(position)
        if group is None or group.result is not ended:  # it was aborted
            return
        if ended.cancelled():  # user code cancelled it; `take` must not wait for it
            self._fail(RolloutError(f"the samples of prompt {position} were cancelled"))
            return
        if error := ended.exception():
            self._fail(error)
            return
        result = ended.result()
        self.counts.failures += len(result.failures)
        if self.score is None:
            self._judge(position, result.trajectories)
            return
        self.unscored[position] = result.trajectories
        self._score_if_ready()

    def _score_if_ready(self) -> None:
        """Score all finished groups in one call if the models are free; in rounds, once all groups have finished."""
        if self.score is None or self.scoring is not None or not self.unscored:
            return
        if self.limits.in_rounds and len(self.unscored) < len(self.running):
            return
        groups = dict(sorted(self.unscored.items()))
        self.unscored.clear()
        self.scoring = asyncio.ensure_future(self.score([item for group in groups.values() for item in group]))
        self.scoring.add_done_callback(lambda scored: self._finish_scoring(groups, scored))

    def _finish_scoring(self, groups: dict[int, GroupSamples], scored: asyncio.Future[list[Trajectory]]) -> None:
        """Judge the groups of a call, and score those that have finished since."""
        self.scoring = None
        if scored.cancelled():
            return
        if error := scored.exception():
            self._fail(error)
            return
        samples = iter(scored.result())
        for position, group in groups.items():
            self._judge(position, [next(samples) for _ in group])
        self._score_if_ready()

    def _judge(self, position: int, group: GroupSamples) -> None:
        """Accept or reject a group."""
        del self.running[position]
        self.state.running.remove(position)
        if self.is_kept(group):
            self.counts.kept += 1
            self.state.accepted.append(group)
        else:
            self.counts.rejected += 1
        self.changed.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.changed.set()

    def _drop_stale(self) -> None:
        """Drop groups that are too old for the next rollout; rollout i is trained when the weights are at version i."""
        if self.limits.max_staleness is None:
            return
        oldest = self.next - self.limits.max_staleness
        stale = [group for group in self.state.accepted if is_sampled(group) and version_of(group) < oldest]
        self.state.accepted[:] = [group for group in self.state.accepted if group not in stale]
        self.state.again += map(position_of, stale)
        self.counts.stale += len(stale)

    def _is_full(self) -> bool:
        """Return whether the groups of the next rollout are known: in prompt order, unless there is a surplus."""
        accepted, size = self.state.accepted, self.limits.size
        if len(accepted) < size or self.limits.surplus or not self.running:
            return len(accepted) >= size
        return sorted(map(position_of, accepted))[size - 1] < min(self.running)

    def _cut(self) -> list[GroupSamples]:
        """Remove the groups of the next rollout from those that wait, the oldest first."""
        waiting = sorted(self.state.accepted, key=position_of)
        if self.limits.surplus:
            waiting.sort(key=version_of)  # stable: in prompt order within a version
        groups, self.state.accepted[:] = waiting[: self.limits.size], waiting[self.limits.size :]
        self.next += 1
        return sorted(groups, key=position_of)

    def _stragglers(self) -> list[int]:
        """Return the positions of groups to abort: those that started for the next rollout and still run."""
        if not self.limits.aborts:
            return []
        running = self.running.items()
        return [place for place, group in running if group.last_open <= self.next and not group.result.done()]

    async def _abort(self, positions: Sequence[int]) -> None:
        """Cancel groups, whose prompts are then drawn again, and wait until they have ended."""
        ended = [self.running.pop(position).result for position in positions]
        for position in positions:
            self.unscored.pop(position, None)
            self.state.running.remove(position)
            self.state.again.append(position)
        cancel_all(*ended)
        await asyncio.gather(*ended, return_exceptions=True)

    def _reset_counts(self) -> StreamCounts:
        counts, self.counts = self.counts, StreamCounts()
        return counts


def position_of(group: GroupSamples) -> int:
    """Return the position of the group's prompt in the prompt order."""
    return group[0].prompt.index


def version_of(group: GroupSamples) -> int:
    """Return the version of the oldest weights that sampled a token of the group."""
    return min(item.version for item in group)


def is_sampled(group: GroupSamples) -> bool:
    """Return False for a group whose agent returned tokens that no engine sampled, which have no age."""
    return any((item.token_versions != NOT_SAMPLED).any() for item in group)
