"""One worker process, seen from the trainer: started, spoken to, killed with all its children, and mourned once."""

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

from openrlhf.agents.deadline import Deadline, Processor
from openrlhf.agents.loop_thread import Ask, heard
from openrlhf.agents.messages import HEADER, Spec, pack_call, unpack_reply
from openrlhf.types import Completion, Request, SamplingParams

START = "import sys; sys.path[:] = {path}; from openrlhf.agents.worker import main; main({calls}, {replies}, {parent})"
DRAIN_SECONDS = 1.0  # for what a process said last


class Failure(Exception):
    """A call that user code did not answer. `kind` is raised, timeout, died, or the name of one of our errors."""

    def __init__(self, kind: str, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.kind, self.text, self.traceback = kind, text, traceback

    @property
    def is_ours(self) -> bool:
        """Whether it is a whole sentence of one of our errors rather than what user code did."""
        return self.kind.endswith("Error")


@dataclass(eq=False)
class Call:
    """Something asked of user code, wherever it is tried, and what the engine has said to it."""

    number: int
    body: dict[str, Any]
    ask: Ask | None
    retries: int
    answer: asyncio.Future[Any]
    failures: int = 0
    unexplained: int = 0  # processes that ended under it without a sign of whose fault it was
    alone: bool = False  # it ended a process, so its next one is its own
    expired: Failure | None = None
    deadline: Deadline | None = None
    engine_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: dict[int, tuple[Request, asyncio.Future[Completion]]] = field(default_factory=dict)

    def request(self, number: int, request: Request) -> asyncio.Future[Completion]:
        """The engine's answer; an episode that began again hears once more what it was told before."""
        assert self.ask is not None
        before = self.asked.get(number)
        if before is None or before[0] != request:
            self.asked[number] = request, heard(self.ask(request))
        return self.asked[number][1]

    def completions(self) -> tuple[Completion, ...]:
        return tuple(self.asked[number][1].result() for number in sorted(self.asked))

    def params(self) -> tuple[SamplingParams, ...]:
        return tuple(self.asked[number][0].params for number in sorted(self.asked))


class WorkerProcess:
    """User code in a process group of its own, and the calls that live there."""

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
        self.retiring = False  # takes no more calls
        self.doomed = False
        self.over = False
        self.blamed: Call | None = None
        self.failure: Failure | None = None  # why we killed it
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.loading: asyncio.TimerHandle
        self.life = asyncio.get_running_loop().create_task(self._live())

    def send(self, *message: Any) -> None:
        if self.writer is not None and not self.doomed and not self.writer.is_closing():
            self.writer.write(pack_call(message))

    def kill(self) -> None:
        """The process and whatever it started, at once."""
        self.doomed = True
        if self.process is not None and not self.over:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def fail(self, failure: Failure, blamed: Call | None = None) -> None:
        """Kills the process and says why, and whose fault it is."""
        if self.failure is None:
            self.failure, self.blamed = failure, blamed
        self.kill()

    async def _live(self) -> None:
        try:
            ended = how_it_ended(await self._run())
        except OSError as error:
            ended = f"it could not be started: {error}"
        if self.failure is None:
            self.failure = Failure("died", f"ended its process: {ended}")
            self.blamed = self._culprit()
        self.bury(self)

    async def _run(self) -> int:
        """The exit code, when the process and its pipe have both ended."""
        # A pair for each direction: a write that fails closes its socket, and what was said last must still be read.
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
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self.hear(self, unpack_reply(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _culprit(self) -> Call | None:
        """Who ended the process: the call on the processor, or the only one; None where that cannot be told."""
        if self.processor.running in self.calls:
            return self.calls[self.processor.running]
        return next(iter(self.calls.values())) if self.ready and len(self.calls) == 1 else None


async def start_process(calls: int, replies: int) -> asyncio.subprocess.Process:
    """A fresh interpreter in a session of its own: Ctrl-C at the terminal is the trainer's to handle."""
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
