"""Serve a reward model over HTTP, from its flags to a stop that lets nobody down."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import ServeRMConfig
from openrlhf.errors import ConfigError
from openrlhf.launch.batcher import Batcher, ForwardLimits
from openrlhf.launch.device import choose_device, explain_precision
from openrlhf.launch.explain import explain_experts
from openrlhf.launch.serve_app import Door, build_app
from openrlhf.launch.served_model import load_reward_model
from openrlhf.monitor import say

STDERR = 2
BATCH_TOKENS = {"cuda": 32768, "cpu": 2048}  # on CPUs the activations of more no longer fit the cache
STOPPING = "\nopenrlhf: stopping when the requests in flight are answered; Ctrl-C once more stops at once\n"


class Server(uvicorn.Server):
    """Uvicorn, which finishes what is in flight and then raises the signal anew; remembers which one that is."""

    stopped_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is None:
            os.write(STDERR, STOPPING.encode())  # a print may be what the signal interrupted
        self.stopped_by = sig
        super().handle_exit(sig, frame)


def run(config: ServeRMConfig) -> None:
    """Serves until SIGTERM, which is a good end, or Ctrl-C, which is raised as everywhere."""
    disable_progress_bar()
    host, port = config.server.host, config.server.port
    with bind(host, port) as listener:  # a port that is taken is known before a model loads
        leave_a_core()
        server = build_server(config)
        gc.freeze()  # a collection would walk over all that was imported, and every request waits for it: 0.2 s
        with explained(host, port):
            listener.listen()  # two that bound the same port while their models loaded learn it here
        say(f"{config.server.reward_pretrain} answers on http://{address(listener)}/get_reward; Ctrl-C stops")
        try:
            server.run([listener])
        except KeyboardInterrupt:
            if server.stopped_by != signal.SIGTERM:
                raise


def leave_a_core() -> None:
    """One core stays with the requests: a forward waits for its slowest thread, so a model on all cores is stopped as a
    whole whenever one of them reads a request.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def build_server(config: ServeRMConfig) -> Server:
    """Everything but the address; the model loads here."""
    flags = config.server
    device = choose_device(config.model.device)
    explain_precision(config.model.param_dtype, device)
    explain_experts(config.model, str(flags.reward_pretrain))
    model = load_reward_model(config, device)
    tokens = flags.batch_tokens or BATCH_TOKENS[device.type]
    limits = ForwardLimits(flags.batch_size, tokens, flags.packing_samples)
    door = Door(flags.api_key or None, flags.max_request_mb << 20, flags.refuse_long)
    app = build_app(model, Batcher(model.score, limits), door)
    return Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address but does not listen yet: until the model is there, clients are refused."""
    with explained(host, port):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    return listener


@contextmanager
def explained(host: str, port: int) -> Iterator[None]:
    """Why an address cannot be had, with the flags that name it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port} is taken on {host}", try_this=f"--port {port + 1}") from None
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {error.strerror}") from None


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
