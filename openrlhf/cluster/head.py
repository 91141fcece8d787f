"""Watch over Ray's head node, without which no run can continue: if it is lost, the run ends with a clear error.

Otherwise Ray would try to reach the head for a minute and then end the driver from C++, without any cleanup.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from openrlhf.cluster.address import is_reachable, open_line
from openrlhf.cluster.calls import GO_ON
from openrlhf.errors import BackendError
from openrlhf.monitor import say

SECONDS_OF_SILENCE = 10.0  # timeout for a head that neither accepts nor refuses connections
SECONDS_BETWEEN = 0.1  # between two attempts to connect to a head that closed the connection
MAY_COME_BACK = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's variable; set if the head keeps its state in Redis
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, seconds, probes; Linux names


class Head:
    """The head node at an address. Once it is `lost`, do not call Ray any more: it would wait for the head."""

    def __init__(self, address: str, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self.patience = float(environ.get(MAY_COME_BACK) or 0)
        self.lost = False
        self.line: socket.socket | None = None

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """Cancel the body of the context when the head is lost, and raise a BackendError that says so.

        Other errors raised while the head is gone are reported as the loss of the head, too.
        """
        loop = asyncio.get_running_loop()

        def end() -> None:
            with suppress(RuntimeError):  # the context has already ended
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
        """Watch the head on a thread: the event loop may be busy, or blocked by Ray, which waits for the head."""
        released = threading.Event()
        watch = threading.Thread(target=self._watch, args=(released, tell), daemon=True, name="openrlhf-head")
        watch.start()
        try:
            yield
        finally:
            released.set()
            if self.line is not None:
                with suppress(OSError):  # the head closed the connection first
                    self.line.shutdown(socket.SHUT_RDWR)
            watch.join()

    def _watch(self, released: threading.Event, tell: Callable[[], object]) -> None:
        """Reconnect whenever the connection closes; call `tell` once the head is away longer than allowed."""
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
            except ConnectionRefusedError:  # the machine is up, but the head does not listen
                allowed = self.patience
            except OSError:
                allowed = max(self.patience, SECONDS_OF_SILENCE)
            missed = missed or time.monotonic()
            if time.monotonic() - missed >= allowed:
                self.lost = True
                say(str(self._error()))  # now: Ray may end a driver that has outlived its shell at any moment
                tell()
                return

    def _stay_connected(self, released: threading.Event) -> None:
        """Hold a connection until the head closes it, as Ray sometimes does with silent clients."""
        with open_line(self.address) as self.line:
            keep_alive(self.line)
            with suppress(OSError):
                while not released.is_set() and self.line.recv(4096):
                    pass


def keep_alive(line: socket.socket) -> None:
    """Turn on TCP keepalive, to notice a machine that disappears without closing its connections."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
