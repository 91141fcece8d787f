"""Watch Ray's head node, without which no run can continue: if it is lost, the run ends with a clear error.

Otherwise Ray would try to reach the head for a minute and then end the driver from C++, without any cleanup. A thread
holds a TCP connection to the head, because the event loop may be busy, or blocked by a call of Ray that waits for the
head.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from openrlhf.cluster.address import is_reachable, open_connection
from openrlhf.errors import RESUME, BackendError
from openrlhf.monitor import say
from openrlhf.rollout.link import keep_alive

SILENCE_TIMEOUT = 10.0  # seconds, for a head that neither accepts nor refuses connections
# Seconds between two attempts to connect to a head that closes connections immediately. A dying head may do so once,
# and Ray ends this process at its next call, so the first attempts follow quickly.
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1
MAY_COME_BACK = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's variable; set if the head keeps its state in Redis


class Head:
    """The head node at an address. Once it is `lost`, do not call Ray again: the call would wait for the head."""

    def __init__(self, address: str, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self.patience = float(environ.get(MAY_COME_BACK) or 0)  # seconds that the head may take to restart
        self.lost = False
        self.connection: socket.socket | None = None
        message = f"the Ray head node at {address} is gone, so the run cannot continue"
        self.error = BackendError(message, try_this=RESUME)

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """Cancel the body of the context when the head is lost, and raise a BackendError that says so.

        Any other error raised while the head is gone is also reported as the loss of the head.
        """
        loop, released = asyncio.get_running_loop(), threading.Event()

        def end() -> None:
            with suppress(RuntimeError):  # the context has already ended
                life.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as life:
                arguments = (released, lambda: loop.call_soon_threadsafe(end))
                watch = threading.Thread(target=self._watch, args=arguments, daemon=True, name="openrlhf-head")
                watch.start()
                try:
                    yield
                finally:
                    released.set()
                    if self.connection is not None:
                        with suppress(OSError):  # the head closed the connection first
                            self.connection.shutdown(socket.SHUT_RDWR)
                    watch.join()
        except Exception as error:  # any error raised while the head is gone is a symptom of its loss
            if not self.lost and is_reachable(self.address):
                raise
            self.lost = True
            raise self.error from error

    def _watch(self, released: threading.Event, report_loss: Callable[[], object]) -> None:
        """Reconnect whenever the connection closes; report the loss once the head has been unreachable too long."""
        missed: float | None = None  # when the head became unreachable
        pause = 0.0
        while not released.wait(pause):
            began = time.monotonic()
            pause = min(2 * pause, LONGEST_PAUSE) or FIRST_PAUSE
            try:
                self._stay_connected(released)
                missed = None
                if time.monotonic() - began > LONGEST_PAUSE:
                    pause = 0.0  # reconnect immediately: Ray may end this process at any moment
                continue
            except ConnectionRefusedError:  # the machine is up, but the head does not listen
                allowed = self.patience
            except OSError:
                allowed = max(self.patience, SILENCE_TIMEOUT)
            missed = missed or time.monotonic()
            if time.monotonic() - missed >= allowed:
                self.lost = True
                say(str(self.error))  # print it now: Ray may end this process at any moment
                report_loss()
                return

    def _stay_connected(self, released: threading.Event) -> None:
        """Hold a connection until the head closes it, as Ray sometimes does with silent clients."""
        with open_connection(self.address) as self.connection:
            keep_alive(self.connection, idle=5, interval=2, probes=3)
            with suppress(OSError):
                while not released.is_set() and self.connection.recv(4096):
                    pass
