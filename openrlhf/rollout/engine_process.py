"""Engines in processes that the trainer starts: several engines on one GPU, without Ray.

    trainer                                              engine process (engine_server.py)
    EngineGroup -> LocalProcess.call  -> socket pair ->  EngineServer -> EngineWorker -> VLLMEngine
                   result, or error  <- (messages)   <-
                   stderr            <- pipe         <-  the engine's output

A process that dies, or that does not react for --engine_timeout seconds, fails all its calls with a DeathError that
says why; `EngineGroup` then replaces it. All processes end with `open_engine_processes`, and with the trainer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, Self, TypeAlias, TypeVar, cast

from openrlhf.errors import RESUME, DeathError, OpenRLHFError
from openrlhf.event_loop import cancel_all, mark_retrieved
from openrlhf.monitor import say
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.rollout.engine_group import EngineGroup, EngineReplica
from openrlhf.rollout.engine_messages import CancelEngineCall, EngineCall, Message, Raised, Returned, encode, received
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.group_sync import LOOPBACK
from openrlhf.subprocesses import describe_exit, kill_group, start_python

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")
Running: TypeAlias = asyncio.Task[None]  # runs as long as an engine's process

START = "from openrlhf.rollout.engine_server import main; main()"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides warnings of PyTorch
CLOSE_SECONDS = 30.0  # time for an engine to release its memory before it is killed
KILL_SECONDS = 30.0  # wait for a killed process to end
DRAIN_SECONDS = 1.0  # wait for the last messages and output of a process that has ended
PING_EVERY = 10.0  # seconds
GRACE_SECONDS = 5.0  # second wait for a missing answer: this process may have been the busy one
TAIL = 4096  # bytes of output kept for the message about a death


@dataclass(eq=False)
class EngineChild:
    """A running engine process: its unanswered calls and the end of its output."""

    name: str
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    unanswered: dict[int, asyncio.Future[object]] = field(default_factory=dict)  # by the number of their call
    count: int = 0  # calls so far; numbers them
    output: bytes = b""  # its last TAIL bytes
    silence: str = ""  # why it was killed, if it did not react
    death: str = ""  # how it ended, once it has

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    async def call(self, method: str, arguments: tuple[object, ...], named: Mapping[str, object]) -> object:
        """Call a method of the worker; if this call is cancelled, so is the worker's."""
        if self.death:
            raise DeathError(self.death, try_this=RESUME)
        self.count += 1
        number = self.count
        answer: asyncio.Future[object] = mark_retrieved(asyncio.get_running_loop().create_future())
        self.unanswered[number] = answer
        try:
            self._send(EngineCall(number, method, arguments, named))
            return await answer
        except asyncio.CancelledError:
            self._send(CancelEngineCall(number))
            raise
        finally:
            self.unanswered.pop(number, None)

    def _send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    def kill(self) -> None:
        """Kill the process and the processes that it started."""
        if not self.death:  # otherwise its id may belong to another process by now
            kill_group(self.process)

    async def run(self, reader: asyncio.StreamReader, timeout: float) -> None:
        """Handle the messages and the output of the process until it ends, and then fail its unanswered calls."""
        listening = asyncio.ensure_future(self._listen(reader))
        relaying = asyncio.ensure_future(self._relay_output())
        watching = asyncio.ensure_future(self.watch(timeout))
        exiting = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({listening, exiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({exiting}, timeout=DRAIN_SECONDS)  # a process that closed its socket is about to end
            if listening.done() and not listening.cancelled() and (error := listening.exception()):
                self.silence = f"sent a message that cannot be read: {error!r}"
            self.kill()  # together with the processes that it started
            await asyncio.wait({exiting}, timeout=KILL_SECONDS)
            await asyncio.wait({listening, relaying}, timeout=DRAIN_SECONDS)
        finally:  # even if cancelled: no caller may wait for an answer that will never come
            self.kill()
            cancel_all(listening, relaying, watching)
            exiting.cancel()
            self.writer.close()
            with suppress(TimeoutError):  # the driver may hold the process longer
                await asyncio.wait_for(self.process.wait(), KILL_SECONDS)
            self.death = f"{self} {self.silence or self._end()}"
            for answer in tuple(self.unanswered.values()):
                if not answer.done():
                    answer.set_exception(DeathError(self.death, try_this=RESUME))

    def _end(self) -> str:
        """Return how the process ended, with the end of its output unless it was killed."""
        code = self.process.returncode
        if code is None or code == -signal.SIGKILL:
            return "died: killed by SIGKILL"
        last = self.output.decode(errors="replace").strip().splitlines()[-1:]
        return f"died: {describe_exit(code)}" + "".join(f"; the last line of its output: {line}" for line in last)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for message in received(reader):
            answer = self.unanswered.get(message.number)
            if answer is None or answer.done():  # cancelled
                continue
            match message:
                case Returned():
                    answer.set_result(message.result)
                case Raised():
                    if message.traceback:
                        say(f"unexpected error in {self}:\n{message.traceback}")
                    answer.set_exception(message.error)

    async def _relay_output(self) -> None:
        """Forward the engine's output to stderr, and keep the end of it."""
        pipe = self.process.stdout
        assert pipe is not None
        while data := await pipe.read(1 << 16):
            self.output = (self.output + data)[-TAIL:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()

    async def watch(self, timeout: float) -> None:
        """Kill the process if it does not react, for example because it was stopped.

        An engine that only makes no progress is reported by its own watchdog, which runs in the process itself.
        """
        while True:
            await asyncio.sleep(min(PING_EVERY, timeout))
            ping = mark_retrieved(asyncio.ensure_future(self.call(EngineWorker.ping.__name__, (), {})))
            for seconds in (timeout, GRACE_SECONDS):
                await asyncio.wait({ping}, timeout=seconds)
            if not ping.done():
                self.silence = f"did not react for {timeout:g} seconds (--engine_timeout)"
                self.kill()
                return


@dataclass(frozen=True)
class LocalProcess:
    """`EngineProcess` of an engine on this machine."""

    child: EngineChild
    machines: Sequence[str] = (LOOPBACK,)
    seconds: float | None = None
    timeout_flag: str | None = None

    def __str__(self) -> str:
        return str(self.child)

    def within(self, seconds: float | None, timeout_flag: str | None = None) -> Self:
        return replace(self, seconds=seconds, timeout_flag=timeout_flag)

    async def call(
        self,
        method: Callable[Concatenate[EngineWorker, Arguments], Awaitable[Answer] | Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        deadline = asyncio.timeout(self.seconds)
        try:
            async with deadline:
                return cast("Answer", await self.child.call(method.__name__, arguments, named))
        except DeathError:
            raise
        except OpenRLHFError as error:
            raise type(error)(f"{self}: {error.message}", try_this=error.try_this) from None
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeathError.of_late(str(self), self.seconds or 0.0, self.timeout_flag) from None

    def kill(self) -> None:
        self.child.kill()


async def start_process(name: str, environment: Mapping[str, str], timeout: float) -> tuple[LocalProcess, Running]:
    """Start a process that waits for its engine; return its handle, and a task that finishes when the process ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await start_python(
            START,
            environment=QUIET | dict(os.environ) | dict(environment),
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    child = EngineChild(name, process, writer)
    return LocalProcess(child), asyncio.ensure_future(child.run(reader, timeout))


@asynccontextmanager
async def open_engine_processes(
    count: int,
    build: Callable[[int], Callable[[], LoadingEngine]],
    *,
    environment: Mapping[str, str],
    timeout: float,
    max_restarts: int,
    in_turn: bool,
    preload: Callable[[], None] | None = None,
    awaits_weights: bool = True,
) -> AsyncIterator[EngineGroup]:
    """Start engines in separate processes, which end with the context.

    `build(number)` returns a picklable function that builds an engine in its process. `environment` is added to this
    process's. With `in_turn`, each engine loads after the previous one is ready; only the imports (`preload`) run in
    all of them at the same time. With `awaits_weights`, requests wait for the policy's weights.
    """
    started: list[LocalProcess] = []
    ready: list[LocalProcess] = []
    running: list[Running] = []
    closing = asyncio.Event()
    turn = asyncio.Semaphore(1 if in_turn else count)

    async def start(number: int) -> LocalProcess:
        process, run = await start_process(f"engine {number}", environment, timeout)
        started.append(process)
        running.append(run)
        if closing.is_set():  # a restart that began before the end of the run
            process.kill()
        starting = process.within(timeout, "--engine_timeout")
        if preload is not None:
            await starting.call(EngineWorker.preload, preload)
        async with turn:
            await starting.call(EngineWorker.start, build(number), awaits_weights)
        ready.append(process)
        return process

    starts = [asyncio.ensure_future(start(number)) for number in range(count)]
    try:
        processes = await asyncio.gather(*starts)
        yield EngineGroup([EngineReplica(*pair) for pair in enumerate(processes)], start, max_restarts)
    finally:
        closing.set()
        cancel_all(*starts)
        await asyncio.gather(*starts, return_exceptions=True)
        try:
            closed = (process.within(CLOSE_SECONDS).call(EngineWorker.close) for process in ready)
            await asyncio.gather(*closed, return_exceptions=True)
        finally:  # even if cancelled again
            for process in started:
                process.kill()
        await asyncio.gather(*running, return_exceptions=True)
