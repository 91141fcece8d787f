"""Calls to the processes of a cluster, and what becomes of them: an answer, their own error by name, or a death."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from openrlhf.agents.loop_thread import heard
from openrlhf.errors import BackendError, EngineError, OpenRLHFError
from openrlhf.monitor import say

Answer = TypeVar("Answer")
ASIDE = "aside"  # the concurrency group of calls that do not wait for what a process is at
COLOURS = re.compile(r"\x1b\[\d+m")
GO_ON = "the same command with --load_checkpoint, which goes on from the last checkpoint"


@dataclass(frozen=True)
class Process:
    """An actor with the name and node that messages call it by."""

    actor: Any
    name: str
    address: str
    takes_back: bool = False  # a call that nobody awaits any more is cancelled there too

    def __str__(self) -> str:
        return f"{self.name} on {self.address}"

    async def call(self, method: str, *arguments: object, **named: object) -> Any:
        import ray

        reference = getattr(self.actor, method).remote(*arguments, **named)
        try:
            return await self.answer(reference)
        except asyncio.CancelledError:
            if self.takes_back and ray.is_initialized():  # else it would start a Ray of its own for this
                ray.cancel(reference)
            raise

    async def answer(self, reference: Awaitable[Answer]) -> Answer:
        """Awaits; an error of ours keeps its kind, anything else becomes a BackendError, a death a DeathError."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            raise self._told(error.cause, str(error)) from error
        except RayActorError as error:
            raise DeathError(f"{self} died: {_reason(error)}", try_this=GO_ON) from None

    def _told(self, cause: BaseException, account: str) -> OpenRLHFError:
        if isinstance(cause, OpenRLHFError):
            return type(cause)(f"{self}: {cause.message}", try_this=cause.try_this)
        say(f"what nobody expected, as {self} tells it:\n{COLOURS.sub('', account)}")  # no log of Ray's has it
        return BackendError(f"{self}: {type(cause).__name__}: {cause}")

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)

    def dismiss(self) -> None:
        """Asks the process itself to end: killing is the business of Ray's head, which may be gone."""
        self.actor.leave.options(concurrency_group=ASIDE).remote()


class DeathError(BackendError):
    """A process is gone."""


LOST = (DeathError, EngineError)  # how a call to an engine ends that must be replaced


def final(error: BackendError) -> BackendError:
    """A death that nobody is to repair."""
    return BackendError(error.message, try_this=GO_ON)


class Fate:
    """Of processes that a run cannot do without: whatever is awaited here ends at once when one of them dies."""

    def __init__(self) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watches: list[asyncio.Task[None]] = []

    def depend_on(self, process: Process) -> None:
        self.watches.append(asyncio.create_task(self._watch(process)))

    async def _watch(self, process: Process) -> None:
        pulse = process.actor.pulse.options(concurrency_group=ASIDE).remote()
        try:
            await process.answer(pulse)
        except BackendError as error:
            if not self.died.done():
                self.died.set_exception(final(error))

    async def race(self, awaited: Awaitable[Answer]) -> Answer:
        task = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait((task, self.died), return_when=asyncio.FIRST_COMPLETED)
            if self.died.done():
                self.died.result()
            return await task
        except DeathError as death:  # heard here before the watch did
            raise final(death) from None
        finally:
            abandon(task)

    def forget(self) -> None:
        """The run is over: deaths are expected."""
        for watch in self.watches:
            watch.cancel()
        if self.died.done():
            self.died.exception()  # looked at, so that asyncio does not complain
        else:
            self.died.cancel()


def abandon(*work: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more, nor wants to hear how it failed."""
    for one in work:
        heard(one).cancel()


def _reason(error: Exception) -> str:
    """Ray's account of a death in one sentence, without its advice."""
    told = " ".join(str(error).split())
    detail = told.partition("Worker exit detail: ")[2] or told
    if "connection error code" in detail:  # all that Ray knows of a process that a signal ended
        return "it crashed or was killed, by a signal or for want of memory"
    return re.split(r"(?<=\w)\. ", detail)[0].rstrip(".") or type(error).__name__
