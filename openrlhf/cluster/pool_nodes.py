"""Worker processes for the reward function or the agent on the other nodes of a cluster.

`ProcessStarter.start_pools` starts a `PoolNode` on each of them: an actor without devices, whose `Pool` has the node's
share of --reward_processes. The driver calls it through a `NodePool`. The driver also sends the requests of an agent to
the engines. An actor cannot call the driver, so a call returns at each request and continues with the answer:

    driver                                            actor on another node
    NodePool.call     EpisodeInput  -- start_call --> Pool.call -> the agent asks the engine
                      Request       <----------------
    generate          Completion    -- answer ------> the agent continues
                      CallResult    <----------------
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from openrlhf.agents.build import limits_of
from openrlhf.agents.node_pools import PoolLost
from openrlhf.agents.sandbox.call import CallFailure, CallResult, Generate
from openrlhf.agents.sandbox.messages import EpisodeInput, RewardInput, WorkerSpec
from openrlhf.agents.sandbox.pool import Pool, refuse_request
from openrlhf.cluster.calls import Process
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.errors import ConfigError, DeathError
from openrlhf.types import Completion, Request

Event: TypeAlias = Request | CallResult | CallFailure  # returned to the driver by a call


class PoolNode:
    """Actor that runs the reward function or the agent in worker processes of its node."""

    pool: Pool

    def __init__(self) -> None:
        self.calls: dict[int, OpenCall] = {}

    async def start(
        self, spec: WorkerSpec, rewards: RewardFlags, digest: str | None, folder: str
    ) -> tuple[float, float]:
        """Load the user's file in a first process; return the capacity and the weight of the pool.

        `digest` is the checksum of the file on the driver's node, `folder` the driver's working directory.
        """
        if digest is None or digest_of(spec.file) != digest:
            raise ConfigError(
                f"{spec.file} is missing here or differs from the file on the driver's node",
                try_this="a file system that all nodes share",
            )
        if Path(folder).is_dir():
            os.chdir(folder)
        self.pool = Pool(spec, limits_of(rewards))
        await asyncio.to_thread(self.pool.start)
        return self.pool.capacity, self.pool.weight

    async def start_call(self, number: int, given: RewardInput | EpisodeInput, *, retries: int) -> Event:
        """Start a call; return its first request to the engine, or its outcome.

        A failure is returned, because Ray would wrap an exception in its own class.
        """
        call = self.calls[number] = OpenCall()
        call.task = asyncio.ensure_future(call.run(self.pool, given, retries))
        return await self._next_event(number)

    async def answer(self, number: int, completion: Completion) -> Event:
        """Pass on the engine's answer; return the next request of the call, or its outcome."""
        self.calls[number].completion.set_result(completion)
        return await self._next_event(number)

    async def _next_event(self, number: int) -> Event:
        event = await self.calls[number].events.get()
        if not isinstance(event, Request):
            del self.calls[number]
        if isinstance(event, Exception) and not isinstance(event, CallFailure):
            raise event
        return event

    async def give_up(self, number: int) -> None:
        """Cancel a call, if it has not ended."""
        call = self.calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def exit(self) -> None:
        os._exit(0)


class OpenCall:
    """A call in progress on a node: its events that the driver has not read yet, and the answer that it waits for."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    async def run(self, pool: Pool, given: RewardInput | EpisodeInput, retries: int) -> None:
        """Run the call to its end."""
        try:
            self.events.put_nowait(await pool.call(given, retries=retries, generate=self.ask))
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must not wait for it
            self.events.put_nowait(error)

    async def ask(self, request: Request) -> Completion:
        """Send a request to the driver and wait for the answer; a call makes one request at a time."""
        self.completion = asyncio.get_running_loop().create_future()
        self.events.put_nowait(request)
        return await self.completion


@dataclass(frozen=True, eq=False)
class NodePool:
    """The pool of a `PoolNode`, seen from the driver."""

    process: Process[PoolNode]
    capacity: float
    weight: float
    share: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __str__(self) -> str:
        return str(self.process)

    async def call(
        self, given: RewardInput | EpisodeInput, *, retries: int, generate: Generate = refuse_request
    ) -> CallResult:
        number = next(self.numbers)
        try:
            event = await next_event(self.process.call(PoolNode.start_call, number, given, retries=retries))
            while isinstance(event, Request):
                completion = await generate(event)
                event = await next_event(self.process.call(PoolNode.answer, number, completion))
        except BaseException:  # the engine failed, or the caller was cancelled
            self.process.tell(PoolNode.give_up, number)
            raise
        if isinstance(event, CallFailure):
            raise event
        return event


async def next_event(called: Awaitable[Event]) -> Event:
    """Await a call to a node; raise PoolLost if the node's actor is gone."""
    try:
        return await called
    except DeathError as error:
        raise PoolLost(error.message) from None


def digest_of(file: str) -> str | None:
    """Return the checksum of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def share_processes(total: int | None, nodes: int) -> list[int | None]:
    """Divide --reward_processes among nodes, the driver's first; None is the default number on each node."""
    if total is None:
        return [None] * nodes
    return [total // nodes + (number < total % nodes) for number in range(nodes)]
