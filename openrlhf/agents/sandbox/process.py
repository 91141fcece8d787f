"""Trainer-side handle of a worker process: start it, exchange messages, kill its process group, report its exit once.

The pool creates a `WorkerProcess` with callbacks for messages (`hear`) and for its end (`bury`). A `Call` is one piece
of work for user code; it survives the process that runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.sandbox.deadline import Deadline, Processor
from openrlhf.agents.sandbox.loop_thread import Ask, heard
from openrlhf.agents.sandbox.messages import HEADER, Spec, pack_call, unpack_reply
from openrlhf.types import Completion, Request, SamplingParams

START = (
    "import sys; sys.path[:] = {path}; "
    "from openrlhf.agents.sandbox.worker import main; main({calls}, {replies}, {parent})"
)
DRAIN_SECONDS = 1.0  # wait for the last messages of a process that has ended


class Failure(Exception):
    """A call that user code failed to answer.

    `kind` is "raised", "timeout", "died", "loading", or the class name of an OpenRLHFError. Unless `is_ours`, `text` is
    the rest of a sentence about the user's code, such as "raised ValueError: ...".
    """

    def __init__(self, kind: str, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.kind, self.text, self.traceback = kind, text, traceback

    @property
    def is_ours(self) -> bool:
        """Whether `text` is the complete message of an OpenRLHFError."""
        return self.kind.endswith("Error")


@dataclass(eq=False)
class Call:
    """One call of user code, over all its attempts, with the engine's answers to its requests.

    Answers are kept so that a retried episode gets the same completions for the same requests.
    """

    number: int
    body: dict[str, Any]
    ask: Ask | None
    retries: int
    answer: asyncio.Future[Any]
    failures: int = 0
    unexplained: int = 0  # crashes of its process with unknown cause
    alone: bool = False  # it crashed a process, so it gets the next one for itself
    expired: Failure | None = None
    deadline: Deadline | None = None
    engine_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: dict[int, tuple[Request, asyncio.Future[Completion]]] = field(default_factory=dict)  # by request number

    def request(self, number: int, request: Request) -> asyncio.Future[Completion]:
        """Send request `number` to the engine, or return the earlier answer if a retry repeats the request."""
        assert self.ask is not None
        before = self.asked.get(number)
        if before is None or before[0] != request:
            self.asked[number] = request, heard(self.ask(request))
        return self.asked[number][1]

    def completions(self) -> tuple[Completion, ...]:
        """Return the engine's answers in request order; all must have arrived."""
        return tuple(self.asked[number][1].result() for number in sorted(self.asked))

    def params(self) -> tuple[SamplingParams, ...]:
        """Return the sampling parameters of the requests, in the order of `completions`."""
        return tuple(self.asked[number][0].params for number in sorted(self.asked))


class WorkerProcess:
    """A process with its own process group that runs user code, and the calls assigned to it."""

    def __init__(
        self,
        spec: Spec,
        hear: Callable[[WorkerProcess, list[Any]], None],
        bury: Callable[[WorkerProcess], None],
        *,
        alone: bool = False,
    ) -> None:
        self.spec, self.hear, self.bury, self.alone = spec, hear, bury, alone
        self.calls: dict[int, Call] = {}
        self.processor = Processor()
        self.ready = False
        self.retiring = False  # gets no more calls
        self.doomed = False  # killed, or to be killed once started
        self.over = False  # killed for the last time; its process id may be reused
        self.blamed: Call | None = None
        self.failure: Failure | None = None  # why it was killed, or how it ended
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.loading: asyncio.TimerHandle
        self.life = asyncio.get_running_loop().create_task(self._live())

    def send(self, *message: Any) -> None:
        """Send a message, unless the process is not connected yet or being killed."""
        if self.writer is not None and not self.doomed and not self.writer.is_closing():
            self.writer.write(pack_call(message))

    def kill(self) -> None:
        """Kill the process group immediately."""
        self.doomed = True
        if self.process is not None and not self.over:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def fail(self, failure: Failure, blamed: Call | None = None) -> None:
        """Kill the process and record why, and which call is to blame."""
        if self.failure is None:
            self.failure, self.blamed = failure, blamed
        self.kill()

    async def _live(self) -> None:
        """Run the process to its end, record the cause, and report it to the pool."""
        try:
            ended = how_it_ended(await self._run())
        except OSError as error:
            ended = f"it could not be started: {error}"
        if self.failure is None:
            self.failure = Failure("died", f"ended its process: {ended}")
            self.blamed = self._culprit()
        self.bury(self)

    async def _run(self) -> int:
        """Start the process and serve its messages; return the exit code after process and pipe have ended."""
        # One socket pair per direction: a failed write closes its socket, but the last replies must still be readable.
        calls, their_calls = socket.socketpair()
        replies, their_replies = socket.socketpair()
        with their_calls, their_replies:
            self.process = await start_process(their_calls.fileno(), their_replies.fileno())
        _, self.writer = await asyncio.open_unix_connection(sock=calls)
        reader, closing = await asyncio.open_unix_connection(sock=replies)
        if self.doomed:
            self.kill()
        else:
            self.writer.write(pack_call(self.spec))
        listening = asyncio.ensure_future(self._listen(reader))
        exiting = asyncio.ensure_future(self.process.wait())
        await asyncio.wait({listening, exiting}, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        self.over = True
        await asyncio.wait({exiting})
        await asyncio.wait({listening}, timeout=DRAIN_SECONDS)
        listening.cancel()
        self.writer.close()
        closing.close()
        return exiting.result()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Pass each reply to the pool until the pipe closes."""
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self.hear(self, unpack_reply(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _culprit(self) -> Call | None:
        """Return the call that ended the process: the running one or the only one; None if unknown."""
        if self.processor.running in self.calls:
            return self.calls[self.processor.running]
        return next(iter(self.calls.values())) if self.ready and len(self.calls) == 1 else None


async def start_process(calls: int, replies: int) -> asyncio.subprocess.Process:
    """Start a new interpreter in its own session, so that Ctrl-C in the terminal reaches only the trainer."""
    code = START.format(path=json.dumps(sys.path), calls=calls, replies=replies, parent=os.getpid())
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(calls, replies),
        start_new_session=True,
        env=environment,
    )


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
