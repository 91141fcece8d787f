"""A stand-in for an engine, for tests of the process around it; it needs no torch, so its process starts quickly."""

import asyncio
import os
import signal
import sys

from openrlhf.errors import RolloutError
from openrlhf.types import Completion

# The first token of a prompt, which says what the engine does with it.
ECHO, KILLED, EXITS, REJECTS, FAILS, WAITS, UNSENDABLE = range(7)


class StandInEngine:
    """Echoes prompts, or does what the first token says."""

    def __init__(self, number):
        self.number = number
        self.cancelled = 0
        self.waits = asyncio.Event()  # set once a request waits
        self.closed = False

    async def generate(self, requests):
        for request in requests:
            match request.prompt_token_ids[0]:
                case 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                case 2:
                    os.write(sys.stderr.fileno(), b"out of ideas\n")
                    os._exit(3)
                case 3:
                    raise RolloutError("too long", try_this="a shorter prompt")
                case 4:
                    raise ZeroDivisionError("by zero")
                case 5:
                    await self._wait()
                case 6:
                    return [lambda: None]
        return [Completion.of(request.prompt_token_ids, (), str(self.number), "stop", 0) for request in requests]

    async def _wait(self):
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def health(self):
        """Report the number of cancelled requests, which is all that the tests want to know."""
        if self.cancelled:
            raise RolloutError(f"{self.cancelled} cancelled")

    async def resume(self):
        """Return once a request waits."""
        await self.waits.wait()

    async def close(self):
        self.closed = True
