"""The head of a cluster, where Ray keeps its books. No run goes on without it: it ends by itself when it is lost.

Left alone Ray tries to reach it for a minute, and then ends the driver from C++, past everything that tidies up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from openrlhf.errors import BackendError
from openrlhf.launch.ray.address import is_reachable, open_line
from openrlhf.launch.ray.calls import GO_ON
from openrlhf.monitor import say

SECONDS_OF_SILENCE = 10.0  # before a head that neither answers nor refuses counts as lost
SECONDS_BETWEEN = 0.1  # two calls to a head that hangs up
MAY_COME_BACK = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's own; set where a head keeps its state in Redis
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, seconds, times; by names of Linux


class Head:
    """The head at an address. Once it is `lost`, Ray is asked for nothing more: it would wait for the head's answer."""

    def __init__(self, address: str, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self.patience = float(environ.get(MAY_COME_BACK) or 0)
        self.lost = False
        self.line: socket.socket | None = None

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """Whatever is awaited within it ends when the head is lost; and what fails without a head, fails for that."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            with suppress(RuntimeError):  # it has ended meanwhile
                life.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as life:
                with self._watched(lambda: loop.call_soon_threadsafe(end)):
                    yield
        except Exception as error:
            if not self.lost and is_reachable(self.address):
                raise
            self.lost = True
            raise self._error() from error

    def _error(self) -> BackendError:
        return BackendError(f"the head of Ray at {self.address} is gone, and the run with it", try_this=GO_ON)

    @contextmanager
    def _watched(self, tell: Callable[[], object]) -> Iterator[None]:
        """By a thread, since the event loop may be busy, or wait for Ray, which waits for the head."""
        released = threading.Event()
        watch = threading.Thread(target=self._watch, args=(released, tell), daemon=True, name="openrlhf-head")
        watch.start()
        try:
            yield
        finally:
            released.set()
            if self.line is not None:
                with suppress(OSError):  # the head hung up first
                    self.line.shutdown(socket.SHUT_RDWR)
            watch.join()

    def _watch(self, released: threading.Event, tell: Callable[[], object]) -> None:
        missed: float | None = None
        pause = 0.0
        while not released.wait(pause):
            began, pause = time.monotonic(), SECONDS_BETWEEN
            try:
                self._stay_connected(released)
                missed = None
                if (
                    time.monotonic() - began > SECONDS_BETWEEN
                ):  # reconnect immediately: Ray may end this process any moment
                    pause = 0.0
                continue
            except ConnectionRefusedError:  # its machine is there, and nobody listens
                allowed = self.patience
            except OSError:
                allowed = max(self.patience, SECONDS_OF_SILENCE)
            missed = missed or time.monotonic()
            if time.monotonic() - missed >= allowed:
                self.lost = True
                say(str(self._error()))  # at once: a driver that has outlived its shell may be ended by Ray any moment
                tell()
                return

    def _stay_connected(self, released: threading.Event) -> None:
        """Until the other end hangs up, as Ray also does now and then on callers who say nothing."""
        with open_line(self.address) as self.line:
            keep_alive(self.line)
            with suppress(OSError):
                while not released.is_set() and self.line.recv(4096):
                    pass


def keep_alive(line: socket.socket) -> None:
    """So that the end of a machine, which says nothing, is noticed too."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
