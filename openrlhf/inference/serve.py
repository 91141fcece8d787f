"""The serve_rm command: serve a reward model over HTTP until stopped.

`run` binds the port, loads the model and runs uvicorn; `serve_app` handles the requests and `batcher` batches their
rows. A stop signal lets the requests in flight finish, within --stop_timeout.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import uvicorn
from fastapi import FastAPI
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import ServeRMConfig
from openrlhf.config.sections.inference import ServingFlags
from openrlhf.errors import ConfigError
from openrlhf.inference.batcher import Batcher, ForwardLimits
from openrlhf.inference.engine import choose_model_device
from openrlhf.inference.serve_app import build_app
from openrlhf.inference.served_model import open_served_model
from openrlhf.monitor import say
from openrlhf.signals import write_line
from openrlhf.training.process_state import present_objects_frozen

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

BATCH_TOKENS = {"cuda": 32768, "cpu": 2048}  # on a CPU, the activations of more tokens do not fit in the cache
LAST_SECONDS = 3  # extra time for the process to exit after --stop_timeout
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
STOPPING = "\nopenrlhf: stopping when the requests in flight are answered; press Ctrl-C again to stop immediately"


class RewardModelServer(uvicorn.Server):
    """Uvicorn server with time limits for clients, which also records the signal that stopped it.

    Uvicorn itself waits forever for a request that has begun. After a signal it finishes the requests in flight and
    then raises the signal again.
    """

    def __init__(self, app: FastAPI, flags: ServingFlags) -> None:
        settings = uvicorn.Config(
            app,
            http="h11",  # unlike httptools, it limits headers and the requests that a client sends ahead
            ws="none",
            timeout_graceful_shutdown=flags.stop_timeout,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        super().__init__(settings)
        self.max_connections = flags.max_connections
        self.request_timeout = flags.request_timeout
        self.stop_timeout = flags.stop_timeout
        self.waiting: dict[H11Protocol, Wait] = {}  # connections that wait for their client, the longest first
        self.stopped_by: int | None = None

    async def on_tick(self, counter: int) -> bool:
        """Close connections that have waited too long for their client.

        If there are too many connections, those that have waited longest are also closed. Uvicorn calls this every
        0.1 s.
        """
        now, connections = time.monotonic(), cast("set[H11Protocol]", self.server_state.connections)
        waits = {one: Wait(one.cycle, now) for one in connections if waits_for_client(one)}
        # The wait starts again if the connection has begun another request since the last tick.
        old = {one: wait for one, wait in self.waiting.items() if one in waits and wait.cycle is waits[one].cycle}
        self.waiting = old | {one: wait for one, wait in waits.items() if one not in old}
        excess = len(connections) - self.max_connections
        for place, (connection, wait) in enumerate(list(self.waiting.items())):
            if place < excess or now - wait.since > self.request_timeout:
                self.drop(connection)
        return await super().on_tick(counter)

    def drop(self, connection: H11Protocol) -> None:
        """Close a connection that waits for its client."""
        del self.waiting[connection]
        transport, cycle = connection.transport, connection.cycle
        if transport.is_closing() or connection.flow.write_paused:
            transport.abort()  # `close` would first wait until everything is sent
            return
        if cycle is None or not cycle.response_started:
            transport.write(TIMED_OUT)
        transport.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop within --stop_timeout, even if clients are slow or a query is still being tokenised or scored."""
        if self.stopped_by is not None:
            code = 0 if self.stopped_by == signal.SIGTERM else 128 + signal.SIGINT
            watchdog = threading.Timer(self.stop_timeout + LAST_SECONDS, os._exit, [code])
            watchdog.daemon = True
            watchdog.start()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is None:
            write_line(STOPPING)
        else:
            self.force_exit = True  # uvicorn itself ignores a second SIGTERM
        self.stopped_by = sig
        super().handle_exit(sig, frame)


class Wait(NamedTuple):
    """The wait of a connection for its client; `cycle` is uvicorn's state of the request."""

    cycle: object
    since: float


def waits_for_client(connection: H11Protocol) -> bool:
    """Return whether a connection waits for its client to send a request or to read a response."""
    cycle = connection.cycle
    return cycle is None or cycle.more_body or cycle.response_complete or connection.flow.write_paused


def run(config: ServeRMConfig) -> None:
    """Serve until a signal: return normally after SIGTERM, and raise KeyboardInterrupt after Ctrl-C."""
    disable_progress_bar()
    host, port = config.server.host, config.server.port
    with bind(host, port) as listener:  # before the model loads, so that a taken port is reported immediately
        leave_a_core()
        server = build_server(config)
        with explained(host, port):
            listener.listen()  # fails if another server bound the same port while both loaded their models
        bound, number = listener.getsockname()[:2]
        address = f"[{bound}]:{number}" if ":" in bound else f"{bound}:{number}"
        say(f"{config.server.reward_pretrain} answers on http://{address}/get_reward; Ctrl-C stops the server")
        try:
            with present_objects_frozen():
                server.run([listener])
        except KeyboardInterrupt:
            if server.stopped_by != signal.SIGTERM:
                raise


def leave_a_core() -> None:
    """Reserve one core for handling requests.

    A forward waits for its slowest thread, so a model on all cores would stall whenever one core serves a request.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def build_server(config: ServeRMConfig) -> RewardModelServer:
    """Load the model and build the server, which is not yet bound to an address."""
    flags = config.server
    device = choose_model_device(config.model, str(flags.reward_pretrain))
    model = open_served_model(config, device)
    tokens = flags.batch_tokens or BATCH_TOKENS[device.type]
    limits = ForwardLimits(flags.batch_size, tokens, flags.packing_samples)
    return RewardModelServer(build_app(model, Batcher(model.score, limits), flags), flags)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that clients are refused until the model is loaded."""
    with explained(host, port):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    return listener


@contextmanager
def explained(host: str, port: int) -> Iterator[None]:
    """Turn an OSError about the address into a ConfigError that names the flags."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port} is taken on {host}", try_this=f"--port {port + 1}") from None
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {error.strerror}") from None
