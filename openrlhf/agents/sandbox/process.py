"""Trainer-side handle of a worker process: start it, exchange messages, kill its descendants, report its exit once.

The pool assigns calls to a `WorkerProcess`, which reports the end of each call and of the process through callbacks.
The handle enforces the deadlines of its calls and passes their requests to the engine. It runs on the pool's event
loop; `worker.Worker` is the other end of the pipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.futures import mark_retrieved
from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.call import Call, CallFailure
from openrlhf.agents.sandbox.deadline import Deadline, LoopUsage
from openrlhf.types import Request, SamplingParams

START = (
    "import sys; sys.path[:] = {path}; "
    "from openrlhf.agents.sandbox.worker import main; main({calls}, {replies}, {parent})"
)
DRAIN_SECONDS = 1.0  # wait for the last messages of a process that has ended
GRACE_SECONDS = 1.0  # time for user code to return after it is cancelled
KILL_SECONDS = 10.0  # time for a supervisor to kill its descendants
LOADING_SECONDS = 300.0  # time limit for loading a user's file, mostly its imports


@dataclass(frozen=True)
class PoolLimits:
    """Concurrency and time limits of a pool."""

    timeout: float  # seconds of user code per call, excluding waits for the engine
    processes: int = 1
    calls_before_another: int = 1  # concurrent calls in a process before another process is started
    calls_per_process: int | None = None  # further calls are queued; None: no limit


class WorkerProcess:
    """A process with its own process group that runs user code, and the calls assigned to it.

    `on_call_end` is called when user code has returned or raised; a call that has no answer then has expired. `on_exit`
    is called once, after the process has ended and `failure` and `blamed` are set.
    """

    def __init__(
        self,
        spec: messages.WorkerSpec,
        limits: PoolLimits,
        on_call_end: Callable[[WorkerProcess, Call], None],
        on_exit: Callable[[WorkerProcess, CallFailure], None],
        *,
        alone: bool = False,
    ) -> None:
        self.limits, self.on_call_end, self.on_exit, self.alone = limits, on_call_end, on_exit, alone
        self.calls: dict[int, Call] = {}  # calls sent but not yet answered, by number
        self.deadlines: dict[int, Deadline] = {}  # deadlines of these calls, once the file is loaded
        self.usage = LoopUsage()
        self.retiring = False  # True: no further calls are assigned
        self.killed = False  # killed, or to be killed once started
        self.reaped = False  # True once its process id may be reused
        self.failure: CallFailure | None = None  # why it was killed, or how it ended
        self.blamed: Call | None = None  # the call that caused `failure`, if known
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.unsent: list[bytes] = []  # messages from before the pipe was connected
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = mark_retrieved(self.loop.create_future())
        too_slow = CallFailure(f"took longer than {LOADING_SECONDS:g} s to load")
        self.loading = self.loop.call_later(LOADING_SECONDS, self.fail, too_slow)
        self.send(spec)
        self.task = self.loop.create_task(self._run_and_report())

    def send(self, message: messages.ToWorker) -> None:
        """Send a message, unless the process is being killed."""
        data = pickle.dumps(message)
        framed = messages.HEADER.pack(len(data)) + data
        if self.writer is None:
            self.unsent.append(framed)
        elif not self.killed and not self.writer.is_closing():
            self.writer.write(framed)

    def kill(self) -> None:
        """Kill the process and everything that it started, including daemons outside its process group."""
        self.killed = True
        if self.process is None or self.reaped:
            return
        if sys.platform == "linux" and self.process.returncode is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # SIGCONT in case its supervisor is stopped
                with suppress(ProcessLookupError):
                    # Process.send_signal would poll first, and take the exit code away from asyncio's own wait.
                    os.kill(self.process.pid, number)
            self.loop.call_later(KILL_SECONDS, self._kill_group)
        else:
            self._kill_group()

    def _kill_group(self) -> None:
        if self.process is not None and not self.reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def fail(self, failure: CallFailure, blamed: Call | None = None) -> None:
        """Kill the process, and record the cause and the call to blame."""
        if self.failure is None:
            self.failure, self.blamed = failure, blamed
        self.kill()

    def start_deadline(self, call: Call) -> None:
        """Start the deadline of a call; if the file is still loading, `_listen` starts it later."""
        if self.loaded.done():
            self.deadlines[call.number] = Deadline(
                call.number, self.limits.timeout, self.usage, lambda: self._stop_expired(call)
            )

    def _stop_expired(self, call: Call) -> None:
        """Stop a call that exceeded its deadline.

        If its code is running, the process is killed. If it only waits, it is cancelled, and other calls in the
        process continue; the process is killed if the call has not returned after GRACE_SECONDS.
        """
        call.expired = expired = CallFailure(f"did not return within {self.limits.timeout:g} s (--reward_timeout)")
        self.retiring = True  # threads of the cancelled call may still run in this process
        self.send(messages.CancelCall(call.number))

        def kill_unless_ended() -> None:
            if call.number not in self.calls or self.killed:
                return
            if self.usage.running in (None, call.number):
                self.fail(expired, call)
            else:  # another call blocks the event loop, so the cancellation cannot take effect yet
                self.loop.call_later(GRACE_SECONDS, kill_unless_ended)

        self.loop.call_later(0.0 if self.usage.running == call.number else GRACE_SECONDS, kill_unless_ended)

    async def _run_and_report(self) -> None:
        """Run the process to its end, find the cause and the call to blame, and report them to the pool."""
        try:
            code = await self._run()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            problem = f"ended its process: {how}"
        except OSError as error:
            problem = f"cannot run: its process could not be started: {error}"
        if self.failure is None:
            self.failure = CallFailure(problem)
            if self.usage.running in self.calls:
                self.blamed = self.calls[self.usage.running]
            elif self.loaded.done() and len(self.calls) == 1:
                (self.blamed,) = self.calls.values()
        self.loading.cancel()
        for deadline in self.deadlines.values():
            deadline.stop()
        if not self.loaded.done():
            self.loaded.set_exception(self.failure)
        self.on_exit(self, self.failure)

    async def _run(self) -> int:
        """Start the process and handle its messages; return the exit code once the process has ended."""
        # One socket pair per direction: a failed write closes its socket, but the last replies must still be readable.
        calls, their_calls = socket.socketpair()
        replies, their_replies = socket.socketpair()
        descriptors = their_calls.fileno(), their_replies.fileno()
        with their_calls, their_replies:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                START.format(
                    path=json.dumps(sys.path), calls=descriptors[0], replies=descriptors[1], parent=os.getpid()
                ),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
                env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ),
            )
        _, self.writer = await asyncio.open_unix_connection(sock=calls)
        reader, reply_writer = await asyncio.open_unix_connection(sock=replies)
        if self.killed:  # killed before its process id was known
            self.kill()
        else:
            self.writer.writelines(self.unsent)
        self.unsent.clear()
        listening = asyncio.ensure_future(self._listen(reader))
        exiting = asyncio.ensure_future(self.process.wait())
        await asyncio.wait({listening, exiting}, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        await asyncio.wait({exiting})
        self._kill_group()  # a killed supervisor leaves its process group behind
        self.reaped = True
        await asyncio.wait({listening}, timeout=DRAIN_SECONDS)
        listening.cancel()
        self.writer.close()
        reply_writer.close()
        return exiting.result()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Handle the worker's messages until the pipe closes."""
        while True:
            try:
                (length,) = messages.HEADER.unpack(await reader.readexactly(messages.HEADER.size))
                kind, fields = json.loads(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            message: messages.ToTrainer = messages.WORKER_MESSAGES[kind](**fields)
            number = None if isinstance(message, messages.FileLoaded) else message.call
            call = None if number is None else self.calls.get(number)
            match message:
                case messages.RunningCall():
                    self.usage.switch(message.call, self.loop.time())
                case messages.FileLoaded():
                    self.loading.cancel()
                    self.loaded.set_result(None)
                    for waiting in self.calls.values():
                        self.start_deadline(waiting)
                case messages.CallRaised(call=None):
                    self.fail(CallFailure(message.text, message.traceback, message.error_class))
                case messages.EngineRequest() if call is not None:
                    task = self.loop.create_task(self._ask_engine(call, self.deadlines[call.number], message))
                    call.tasks.add(task)
                    task.add_done_callback(call.tasks.discard)
                case messages.CallReturned() | messages.CallRaised() if call is not None and not call.answer.done():
                    if isinstance(message, messages.CallReturned):
                        call.answer.set_result(message.result)
                    elif call.expired is None:
                        failure = CallFailure(message.text, message.traceback, message.error_class)
                        call.answer.set_exception(failure)
                    del self.calls[call.number]
                    self.deadlines.pop(call.number).stop()
                    self.on_call_end(self, call)

    async def _ask_engine(self, call: Call, deadline: Deadline, message: messages.EngineRequest) -> None:
        """Pass a request to the engine, one at a time per episode, with the call's deadline paused."""
        deadline.pause()
        params: dict[str, Any] = message.params | {
            name: tuple(message.params[name]) for name in ("stop", "stop_token_ids")
        }
        request = Request(tuple(message.token_ids), SamplingParams(**params))
        async with call.engine_turn:
            if call.answer.done():
                return
            answer = call.ask_engine(message.request, request)
            await asyncio.wait({answer})
        if answer.cancelled():
            call.answer.cancel()
        elif (error := answer.exception()) is not None:
            if not call.answer.done():
                call.answer.set_exception(error)  # the sample did not cause this error, so raise it unchanged
        elif call.number in self.calls and not self.killed:
            deadline.resume()
            self.send(messages.EngineAnswer(call.number, message.request, answer.result()))
