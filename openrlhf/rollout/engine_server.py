"""Program of an engine process: run the trainer's calls on an `EngineWorker` until the trainer is gone.

`engine_process.py` starts it, with a socket as standard input. The engine has its own threads, so calls run
concurrently on this process's event loop, and a cancelled call cancels its requests. The process never outlives the
trainer: the process ends when the socket closes and, on Linux, the kernel kills it with the trainer, even while the
engine holds the interpreter lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import traceback

from openrlhf.errors import BackendError, OpenRLHFError
from openrlhf.rollout.engine_messages import CancelEngineCall, EngineCall, Raised, Returned, encode, received
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.subprocesses import die_with_parent


def main() -> None:
    """Serve calls on the socket that is standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # launchers signal every process of a run
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # no other code may read from the socket
        os.dup2(nothing.fileno(), 0)
    asyncio.run(EngineServer().serve(connection))


class EngineServer:
    """The worker of this process, and the calls that run on it."""

    def __init__(self) -> None:
        self.worker = EngineWorker()
        self.tasks: dict[int, asyncio.Task[None]] = {}  # by the number of their call

    async def serve(self, connection: socket.socket) -> None:
        """Start the calls that arrive; end the process when the trainer has closed the connection."""
        reader, self.writer = await asyncio.open_unix_connection(sock=connection)
        async for message in received(reader):
            match message:
                case EngineCall():
                    task = asyncio.create_task(self._answer(message))
                    self.tasks[message.number] = task
                    task.add_done_callback(lambda _, number=message.number: self.tasks.pop(number))
                case CancelEngineCall():
                    if message.number in self.tasks:
                        self.tasks[message.number].cancel()
        os._exit(0)  # without waiting for the engine, which may hang

    async def _answer(self, call: EngineCall) -> None:
        """Run a call, and send its result or its error."""
        try:
            result = await getattr(self.worker, call.method)(*call.arguments, **call.named)
            answer = encode(Returned(call.number, result))
        except OpenRLHFError as error:
            answer = encode(Raised(call.number, error))
        except Exception as error:  # noqa: BLE001 - the engine may raise anything, and the caller must not hang
            problem = BackendError(f"{type(error).__name__}: {error}")
            answer = encode(Raised(call.number, problem, traceback.format_exc()))
        self.writer.write(answer)
