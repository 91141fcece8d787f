"""Calls to actor processes, and their failures.

`Process.call` returns the answer, raises the process's own error with the name of the process added, or raises a
`DeathError` if the process is gone. When a process that the run depends on dies, `ProcessWatch` ends all pending waits
immediately. Calls have a deadline (`Process.within`): --worker_timeout for loading models, a training step and a
checkpoint; --engine_timeout for loading an engine; seconds for short calls. Only generation has none, because the
engine itself monitors its progress.

A method is passed as the function itself (`process.call(ModelWorker.send, version, verify)`), so that its arguments and
its answer are type-checked across the process boundary.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from openrlhf.errors import RESUME, BackendError, DeathError, DeviceMemoryError, OpenRLHFError
from openrlhf.event_loop import cancel_all
from openrlhf.monitor import say
from openrlhf.training.memory_check import is_out_of_memory

Worker = TypeVar("Worker", covariant=True)  # class of the actor
Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")
BACKGROUND = "background"  # concurrency group of calls that run alongside the process's current work
COLOURS = re.compile(r"\x1b\[\d+m")
SECONDS_TO_BLAME = 5.0  # wait after a failed call, in case the death of another process caused it


@dataclass(frozen=True)
class Process(Generic[Worker]):
    """Handle of an actor of class `Worker`, with the name and node address used in messages."""

    actor: Any  # Ray's handle, which has the methods of the class as attributes
    name: str
    address: str
    cancels: bool = False  # cancelling the caller also cancels the call in the actor
    seconds: float | None = None  # deadline of a call; a process that misses it counts as dead
    timeout_flag: str | None = None  # flag that sets `seconds`, if there is one
    peers: tuple[Process[object], ...] = ()  # processes on other nodes that are a part of it and end with it

    @property
    def machines(self) -> tuple[str, ...]:
        """Addresses of the nodes that it runs on, its own first."""
        return (self.address, *(peer.address for peer in self.peers))

    def __str__(self) -> str:
        return f"{self.name} on {self.address}"

    def within(self, seconds: float | None, timeout_flag: str | None = None) -> Process[Worker]:
        """Return the same process, with a deadline for its calls."""
        return replace(self, seconds=seconds, timeout_flag=timeout_flag)

    async def call(
        self,
        method: Callable[Concatenate[Worker, Arguments], Awaitable[Answer] | Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Call a method of the actor and await its answer; see `answer` for the errors."""
        import ray

        reference = getattr(self.actor, method.__name__).remote(*arguments, **named)
        try:
            return await self.answer(reference)
        except asyncio.CancelledError:
            if self.cancels and ray.is_initialized():  # without a connection, ray.cancel would start a new Ray
                ray.cancel(reference)
            raise

    async def answer(self, reference: Awaitable[Answer]) -> Answer:
        """Await an answer and translate its errors.

        An OpenRLHFError keeps its type, the death of the process becomes a DeathError, a full device a
        DeviceMemoryError, and any other error a BackendError.
        """
        from ray.exceptions import RayError, RayTaskError

        deadline = asyncio.timeout(self.seconds)
        try:
            async with deadline:
                return await reference
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OpenRLHFError):
                raise type(cause)(f"{self}: {cause.message}", try_this=cause.try_this) from error
            say(f"unexpected error in {self}:\n{COLOURS.sub('', str(error))}")  # Ray does not log the traceback
            if is_out_of_memory(cause):
                raise DeviceMemoryError(f"{self}: {cause}") from error
            raise BackendError(f"{self}: {type(cause).__name__}: {cause}") from error
        except RayError as error:  # the actor died, or its node, or Ray ended it for lack of memory
            # Ray's explanation of the death in one sentence, without its advice.
            message = " ".join(str(error).split())
            detail = message.partition("Worker exit detail: ")[2] or message
            reason = re.split(r"(?<=\w)\. ", detail)[0].rstrip(".") or type(error).__name__
            if "connection error code" in detail:  # Ray has no more details about a process that was ended by a signal
                reason = "it crashed or was killed, by a signal or for lack of memory"
            raise DeathError(f"{self} died: {reason}", try_this=RESUME) from None
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeathError.of_late(str(self), self.seconds or 0.0, self.timeout_flag) from None

    def tell(
        self,
        method: Callable[Concatenate[Worker, Arguments], object],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> None:
        """Call a method of the actor without waiting for it, whether it succeeds or not."""
        import ray

        if ray.is_initialized():  # without a connection, the call would start a new Ray
            getattr(self.actor, method.__name__).remote(*arguments, **named)

    def kill(self) -> None:
        import ray

        for process in (self, *self.peers):
            ray.kill(process.actor)

    def ask_to_exit(self) -> None:
        """Make the process exit by itself; killing it would need Ray's head node, which may be gone."""
        for process in (self, *self.peers):
            process.actor.exit.options(concurrency_group=BACKGROUND).remote()


class ProcessWatch:
    """Watch the processes that a run depends on: when one dies, everything awaited in `guard` fails immediately."""

    def __init__(self) -> None:
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watches: list[asyncio.Task[None]] = []

    def watch(self, process: Process[object]) -> None:
        """Watch the process from now on through its `heartbeat`, a call that fails when the process dies."""

        async def wait_for_death() -> None:
            try:
                await process.within(None).answer(
                    process.actor.heartbeat.options(concurrency_group=BACKGROUND).remote()
                )
            except BackendError as error:
                if not self.death.done():  # a plain BackendError, which no caller tries to recover from
                    self.death.set_exception(BackendError(error.message, try_this=RESUME))

        self.watches.append(asyncio.create_task(wait_for_death()))

    async def guard(self, awaited: Awaitable[Answer]) -> Answer:
        """Await the answer, or raise as soon as a watched process dies."""
        task = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait((task, self.death), return_when=asyncio.FIRST_COMPLETED)
            if self.death.done():
                self.death.result()
            return await task
        except DeathError as error:  # the call failed before the watch noticed the death
            raise BackendError(error.message, try_this=error.try_this) from None
        except BackendError:
            # A rank usually fails because another one died, which Ray may report a little later: prefer that cause.
            await asyncio.wait((self.death,), timeout=SECONDS_TO_BLAME)
            if self.death.done():
                self.death.result()
            raise
        finally:
            cancel_all(task)

    def stop(self) -> None:
        """Stop watching; at the end of a run, processes are expected to die."""
        for watch in self.watches:
            watch.cancel()
        if self.death.done():
            self.death.exception()  # retrieve it, so that asyncio does not warn about it
        else:
            self.death.cancel()
