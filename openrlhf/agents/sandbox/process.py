"""Worker process for the code in a user's file: start it, exchange messages, kill its descendants.

`worker.main` is the program of the process. Messages travel over two socket pairs, in the format of `messages`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys

from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.handle import WorkerHandle
from openrlhf.subprocesses import describe_exit, frame, kill_group, read_frames, send_signal, start_python

START = "from openrlhf.agents.sandbox.worker import main; main({calls}, {replies}, {parent})"
DRAIN_SECONDS = 1.0  # wait for the last messages of a process that has ended
KILL_SECONDS = 10.0  # time for a supervisor to kill its descendants


class WorkerProcess(WorkerHandle):
    """A worker process in its own process group, which runs user code."""

    def prepare(self) -> None:
        self.reaped = False  # True once its process id may be reused
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.unsent: list[bytes] = []  # messages from before the pipe was connected

    def send(self, message: messages.ToWorker) -> None:
        """Send a message, unless the process is being killed."""
        data = frame(pickle.dumps(message))
        if self.writer is None:
            self.unsent.append(data)
        elif not self.killed and not self.writer.is_closing():
            self.writer.write(data)

    def kill(self) -> None:
        """Kill the process and everything that it started, including daemons outside its process group."""
        self.killed = True
        if self.process is None or self.reaped:
            return
        if sys.platform == "linux" and self.process.returncode is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # SIGCONT in case its supervisor is stopped
                send_signal(self.process, number)
            self.loop.call_later(KILL_SECONDS, self._kill_group)
        else:
            self._kill_group()

    def _kill_group(self) -> None:
        if self.process is not None and not self.reaped:
            kill_group(self.process)

    async def run(self) -> str:
        """Run the process to its end and return how it ended."""
        try:
            code = await self._run()
        except OSError as error:
            return f"cannot run: its process could not be started: {error}"
        return f"ended its process: {describe_exit(code)}"

    async def _run(self) -> int:
        """Start the process and handle its messages; return the exit code once the process has ended."""
        # One socket pair per direction: a failed write closes its socket, but the last replies must still be readable.
        calls, their_calls = socket.socketpair()
        replies, their_replies = socket.socketpair()
        descriptors = their_calls.fileno(), their_replies.fileno()
        with their_calls, their_replies:
            self.process = await start_python(
                START.format(calls=descriptors[0], replies=descriptors[1], parent=os.getpid()),
                environment={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        _, writer = await asyncio.open_unix_connection(sock=calls)
        reader, reply_writer = await asyncio.open_unix_connection(sock=replies)
        self.writer = writer  # no await before the unsent messages are written: a later one must not overtake them
        if self.killed:  # killed before its process id was known
            self.kill()
        else:
            self.writer.writelines(self.unsent)
        self.unsent.clear()
        received = (messages.from_json(data) async for data in read_frames(reader))
        listening = asyncio.ensure_future(self.listen(received))
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
