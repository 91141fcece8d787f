"""Calls of a reward function with several groups of samples each (--reward_batch_groups).

Groups become ready one by one. Those that are ready in the same iteration of the event loop, and those that waited
because enough calls were running, start together in prompt order, up to `most` groups in a call. A group never waits
for groups that are not ready, so the last one of a rollout is not delayed. If a call fails, each of its groups is
scored alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeAlias

from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.scores import Samples, Scored
from openrlhf.errors import RewardError
from openrlhf.event_loop import mark_retrieved

Score: TypeAlias = Callable[[Samples], Coroutine[object, None, list[Scored | RewardError]]]


@dataclass(eq=False)
class GroupCall:
    """A call of the reward function, and the number of groups that wait for its scores."""

    scores: asyncio.Future[list[Scored | RewardError]]
    groups: int
    is_shared: bool  # between several groups


@dataclass(eq=False)
class ReadyGroup:
    """A group that is ready to be scored, and the future that gets its call and the index of its first sample in it."""

    samples: Samples
    started: asyncio.Future[tuple[GroupCall, int]]


class GroupBatches:
    """The groups that wait for a call, and the calls that run.

    `call` scores samples in one call, and raises if it fails. `slots` is the number of calls that may run at a time.
    """

    def __init__(self, call: Score, most: int, slots: Callable[[], float]) -> None:
        self.call, self.most, self.slots = call, most, slots
        self.ready: list[ReadyGroup] = []
        self.running: set[asyncio.Future[list[Scored | RewardError]]] = set()

    async def score(self, samples: Samples) -> list[Scored | RewardError]:
        """Score a group, perhaps in one call with others; raise if a call for this group alone fails."""
        loop = asyncio.get_running_loop()
        group = ReadyGroup(samples, loop.create_future())
        self.ready.append(group)
        loop.call_soon(self._start_calls)  # by then, the other groups of this iteration are also ready
        try:
            call, first = await group.started
            try:
                scores = await asyncio.shield(call.scores)
            except (CallFailure, RewardError):
                if not call.is_shared:
                    raise
            else:
                return scores[first : first + len(samples.queries)]
            return await self.call(samples)
        finally:
            self._leave(group)

    def _start_calls(self) -> None:
        """Start calls while groups are ready and slots are free."""
        self.ready = [group for group in self.ready if not group.started.done()]  # others were cancelled
        self.ready.sort(key=lambda group: group.samples.prompts[0].index)
        while self.ready and len(self.running) < self.slots():
            taken, self.ready = self.ready[: self.most], self.ready[self.most :]
            joined = Samples.join([group.samples for group in taken])
            scores = mark_retrieved(asyncio.ensure_future(self.call(joined)))
            self.running.add(scores)
            scores.add_done_callback(self._end_call)
            call, first = GroupCall(scores, len(taken), len(taken) > 1), 0
            for group in taken:
                group.started.set_result((call, first))
                first += len(group.samples.queries)

    def _end_call(self, scores: asyncio.Future[list[Scored | RewardError]]) -> None:
        self.running.discard(scores)
        self._start_calls()

    def _leave(self, group: ReadyGroup) -> None:
        """Forget a group that was scored or cancelled; end a call that no group waits for."""
        if group in self.ready:
            self.ready.remove(group)
        if group.started.done() and not group.started.cancelled():
            call, _ = group.started.result()
            call.groups -= 1
            if call.groups == 0:
                call.scores.cancel()
