"""Calls to actor processes, and their failures.

`Process.call` returns the answer, raises the process's own error with the process named, or raises a `DeathError` if
the process is gone. `Fate` ends all waiting as soon as a process dies that the run cannot do without.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from openrlhf.agents.sandbox.loop_thread import heard
from openrlhf.errors import BackendError, EngineError, OpenRLHFError
from openrlhf.monitor import say

Answer = TypeVar("Answer")
ASIDE = "aside"  # concurrency group of calls that run beside the process's current work
COLOURS = re.compile(r"\x1b\[\d+m")
GO_ON = "the same command with --load_checkpoint, which goes on from the last checkpoint"


@dataclass(frozen=True)
class Process:
    """Handle of an actor, with the name and node address used in messages."""

    actor: Any
    name: str
    address: str
    takes_back: bool = False  # cancelling the caller also cancels the call in the actor

    def __str__(self) -> str:
        return f"{self.name} on {self.address}"

    async def call(self, method: str, *arguments: object, **named: object) -> Any:
        """Call a method of the actor and await its answer; see `answer` for the errors."""
        import ray

        reference = getattr(self.actor, method).remote(*arguments, **named)
        try:
            return await self.answer(reference)
        except asyncio.CancelledError:
            if self.takes_back and ray.is_initialized():  # otherwise ray.cancel would start a new Ray
                ray.cancel(reference)
            raise

    async def answer(self, reference: Awaitable[Answer]) -> Answer:
        """Await an answer and translate its errors.

        An OpenRLHFError keeps its type, the death of the process becomes a DeathError, and any other error a
        BackendError.
        """
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            raise self._told(error.cause, str(error)) from error
        except RayActorError as error:
            raise DeathError(f"{self} died: {_reason(error)}", try_this=GO_ON) from None

    def _told(self, cause: BaseException, account: str) -> OpenRLHFError:
        """Return the error to raise for an exception in the actor; print the traceback of unexpected ones."""
        if isinstance(cause, OpenRLHFError):
            return type(cause)(f"{self}: {cause.message}", try_this=cause.try_this)
        say(f"unexpected error in {self}:\n{COLOURS.sub('', account)}")  # Ray does not log it
        return BackendError(f"{self}: {type(cause).__name__}: {cause}")

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)

    def dismiss(self) -> None:
        """Ask the process to exit by itself; killing it needs Ray's head node, which may be gone."""
        self.actor.leave.options(concurrency_group=ASIDE).remote()


class DeathError(BackendError):
    """A process has died."""


LOST = (DeathError, EngineError)  # errors of a call after which the engine must be replaced


def final(error: BackendError) -> BackendError:
    """Return the error as a plain BackendError, which no caller tries to recover from."""
    return BackendError(error.message, try_this=GO_ON)


class Fate:
    """Watch over the processes that a run depends on: when one dies, everything awaited in `race` fails immediately."""

    def __init__(self) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watches: list[asyncio.Task[None]] = []

    def depend_on(self, process: Process) -> None:
        """Watch the process from now on."""
        self.watches.append(asyncio.create_task(self._watch(process)))

    async def _watch(self, process: Process) -> None:
        """Await the process's `pulse`, a call that never returns and fails when the process dies."""
        pulse = process.actor.pulse.options(concurrency_group=ASIDE).remote()
        try:
            await process.answer(pulse)
        except BackendError as error:
            if not self.died.done():
                self.died.set_exception(final(error))

    async def race(self, awaited: Awaitable[Answer]) -> Answer:
        """Await the answer, or raise as soon as a watched process dies."""
        task = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait((task, self.died), return_when=asyncio.FIRST_COMPLETED)
            if self.died.done():
                self.died.result()
            return await task
        except DeathError as death:  # the call failed before the watch noticed
            raise final(death) from None
        finally:
            abandon(task)

    def forget(self) -> None:
        """Stop watching; at the end of a run, processes are expected to die."""
        for watch in self.watches:
            watch.cancel()
        if self.died.done():
            self.died.exception()  # retrieve it, so that asyncio does not warn about it
        else:
            self.died.cancel()


def abandon(*work: asyncio.Future[Any]) -> None:
    """Cancel the futures and ignore their errors."""
    for one in work:
        heard(one).cancel()


def _reason(error: Exception) -> str:
    """Return Ray's explanation of a death in one sentence, without its advice."""
    told = " ".join(str(error).split())
    detail = told.partition("Worker exit detail: ")[2] or told
    if "connection error code" in detail:  # Ray knows no more about a process that was ended by a signal
        return "it crashed or was killed, by a signal or for want of memory"
    return re.split(r"(?<=\w)\. ", detail)[0].rstrip(".") or type(error).__name__
