"""A stream of groups: as many in progress as the open rollouts still need, and the next prompt for each rejected one.

A rollout is open from the moment it may begin until it is taken; several may be open. The controller calls
`GeneratedRollouts.open_rollouts` and `take`.

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
as enough groups are accepted. The surplus, finished or running, is left for the next rollout. A checkpoint stores
finished groups (`StreamState`); prompts of unfinished ones are drawn again after a resume.

In lockstep, groups run in rounds: the next ones start when all others have ended, and a round is scored in one call.
The engine then gets the same batches in every run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from openrlhf.agents.executor import GroupResult
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import generates_in_lockstep, most_episodes, staleness_limit, surplus_groups
from openrlhf.errors import RolloutError
from openrlhf.event_loop import cancel_all
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.request_batching import EpisodeScheduler
from openrlhf.rl.rollouts import GroupRunner, PromptOrder, Rollout, is_kept
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.types import NOT_SAMPLED, Trajectory

FAILURES = "rollout/failures"  # metric: samples of a rollout that failed and were skipped

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


@dataclass
class StreamCounts:
    """Counts of events since the last rollout was cut."""

    kept: int = 0  # groups
    rejected: int = 0  # groups
    failures: int = 0  # samples that failed and were skipped
    aborted: int = 0  # groups
    stale: int = 0  # groups


@dataclass(frozen=True)
class RunningGroup:
    """A group in progress, and the last rollout that was open when it started."""

    result: asyncio.Future[GroupResult]
    last_open: int


class GeneratedRollouts:
    """`RolloutSource` of samples of the current policy: runs, scores and judges groups, and cuts rollouts from them."""

    def __init__(
        self,
        order: PromptOrder,
        engine: Engine,
        runner: GroupRunner,
        workers: Workers,
        config: RLConfig,
        state: StreamState | None = None,
    ) -> None:
        """Continue from `state`, which changes with every group; a checkpoint stores it."""
        self.order, self.engine, self.runner, self.workers, self.config = order, engine, runner, workers, config
        self.state = StreamState() if state is None else state
        flags, asked = config.rollout, config.rollout.vllm_generate_batch_size
        self.size = flags.rollout_batch_size  # groups per rollout
        self.surplus = surplus_groups(config)  # groups in progress beyond those that the open rollouts need
        self.most_running = asked if asked is not None and asked < self.size else None
        self.in_rounds = generates_in_lockstep(config)  # start groups only when no other is running
        # Abort the groups that are still running when their rollout is complete.
        self.aborts = self.surplus > 0 and flags.abort_stragglers
        self.max_staleness = staleness_limit(config)  # maximum age of a group when it is trained, in weight versions
        self.scheduler = EpisodeScheduler(engine, most_episodes(config), lockstep=self.in_rounds)
        self.next = 0  # number of the next rollout to cut
        self.last_open = -1
        self.counts = StreamCounts()
        self.running: dict[int, RunningGroup] = {}  # groups by position, including those that are not judged yet
        self.unscored: dict[int, GroupSamples] = {}  # by position
        self.scoring: asyncio.Future[None] | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.order)

    def open_rollouts(self, first: int, last: int) -> None:
        """Let the rollouts from `first`, the next to be taken, to `last` begin; in rounds, only one at a time."""
        if not self.in_rounds:
            self.next, self.last_open = first, last
            self._start_groups()

    async def take(self, number: int, place: int) -> Rollout:
        """Run groups until --rollout_batch_size of them are accepted or the prompts run out; return them in order."""
        self.next = number
        self.last_open = max(self.last_open, number)
        while True:
            if self.failure is not None:
                raise self.failure
            self._drop_stale()
            if not self._is_full():
                self._start_groups()
            if self._is_full() or not self.running:  # no groups are left if the prompts have run out
                late = self._stragglers()
                if not late:
                    break
                self.counts.aborted += len(late)
                await self._abort(late)
            else:
                self.changed.clear()
                await self.changed.wait()

        # Cut the rollout from the groups that wait, the oldest first.
        waiting = sorted(self.state.accepted, key=position_of)
        if self.surplus:
            waiting.sort(key=version_of)  # stable: in prompt order within a version
        groups, self.state.accepted[:] = sorted(waiting[: self.size], key=position_of), waiting[self.size :]
        self.next += 1
        version = min(map(version_of, groups), default=self.engine.version)
        trajectories = [item for group in groups for item in group]
        metrics, times = self._metrics(), self.scheduler.times.lap()
        return Rollout(number, version, trajectories, place, self.state.done, metrics, times)

    async def close(self) -> None:
        """Cancel all groups in progress and start no more; a resumed run would draw their prompts again."""
        self.closed = True
        if self.scoring is not None:
            self.scoring.cancel()
        await self._abort(list(self.running))

    def _start_groups(self) -> None:
        """Start as many groups as the open rollouts still need and the limits permit."""
        state = self.state
        num_open = self.last_open - self.next + 1
        if self.closed or num_open < 1 or (self.in_rounds and self.running):
            return
        room = num_open * self.size + self.surplus - len(self.running) - len(state.accepted)
        if self.most_running is not None:
            room = min(room, self.most_running - len(self.running))
        for _ in range(room):
            if state.again:
                position = state.again.pop(0)
            elif state.drawn < len(self.order):
                position = state.drawn
                state.drawn += 1
            else:
                return
            running = self.runner.run(self.order.prompt(position), self.scheduler, self.config)
            group = RunningGroup(asyncio.ensure_future(running), self.last_open)
            state.running.append(position)
            self.running[position] = group
            group.result.add_done_callback(partial(self._finish, position))

    def _finish(self, position: int, ended: asyncio.Future[GroupResult]) -> None:
        """Pass the samples of a group on to scoring, or keep its error for `take`."""
        group = self.running.get(position)
        if group is None or group.result is not ended:  # the group was aborted
            return
        if ended.cancelled():  # user code cancelled it; `take` must not wait for it
            self._fail(RolloutError(f"the samples of prompt {position} were cancelled"))
            return
        if error := ended.exception():
            self._fail(error)
            return
        result = ended.result()
        self.counts.failures += len(result.failures)
        # Filtering needs the scores now; otherwise the models score a whole rollout, in `make_experience`.
        if not self.config.rollout.dynamic_filtering:
            self._judge(position, result.trajectories)
            return
        self.unscored[position] = result.trajectories
        if self.scoring is None or self.scoring.done():
            self.scoring = asyncio.ensure_future(self._score_unscored())

    async def _score_unscored(self) -> None:
        """Score and judge all finished groups in one call, then those that have finished since.

        In rounds, wait until all groups have finished.
        """
        try:
            while self.unscored and not (self.in_rounds and len(self.unscored) < len(self.running)):
                groups = dict(sorted(self.unscored.items()))
                self.unscored.clear()
                samples = [item for group in groups.values() for item in group]
                began = time.perf_counter()
                scored = await with_model_rewards(samples, self.workers, each_step=self.config.rewards.step_rewards)
                self.scheduler.times.rewards.append(time.perf_counter() - began)
                rewarded = iter(scored)
                for position, group in groups.items():
                    self._judge(position, [next(rewarded) for _ in group])
        except Exception as error:  # noqa: BLE001 - `take` raises it
            self._fail(error)

    def _judge(self, position: int, group: GroupSamples) -> None:
        """Accept or reject a group."""
        del self.running[position]
        self.state.running.remove(position)
        if is_kept(group, self.config.rollout):
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
        if self.max_staleness is None:
            return
        oldest = self.next - self.max_staleness
        stale = [group for group in self.state.accepted if is_sampled(group) and version_of(group) < oldest]
        self.state.accepted[:] = [group for group in self.state.accepted if group not in stale]
        self.state.again += map(position_of, stale)
        self.counts.stale += len(stale)

    def _is_full(self) -> bool:
        """Return whether the groups of the next rollout are known: in prompt order, unless there is a surplus."""
        accepted, size = self.state.accepted, self.size
        if len(accepted) < size or self.surplus or not self.running:
            return len(accepted) >= size
        return sorted(map(position_of, accepted))[size - 1] < min(self.running)

    def _stragglers(self) -> list[int]:
        """Return the positions of groups to abort: those that started for the next rollout and are still running."""
        if not self.aborts:
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

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of the groups since the last call."""
        counts, self.counts = self.counts, StreamCounts()
        named = {
            FAILURES: counts.failures,
            "rollout/aborted_groups": counts.aborted,
            "rollout/stale_groups": counts.stale,
        }
        metrics = {name: float(count) for name, count in named.items() if count}
        judged = counts.kept + counts.rejected
        if self.config.rollout.dynamic_filtering and judged:
            metrics["dynamic_filtering_pass_rate"] = 100.0 * counts.kept / judged
        return metrics


def position_of(group: GroupSamples) -> int:
    """Return the position of the group's prompt in the prompt order."""
    return group[0].prompt.index


def version_of(group: GroupSamples) -> int:
    """Return the version of the oldest weights that sampled a token of the group."""
    return min(item.version for item in group)


def is_sampled(group: GroupSamples) -> bool:
    """Return False for a group whose agent returned tokens that no engine sampled, which have no age."""
    return any((item.token_versions != NOT_SAMPLED).any() for item in group)
