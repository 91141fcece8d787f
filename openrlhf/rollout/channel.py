"""The channel that carries weights from one trainer process to the workers of inference engines.

`WeightSender` (weight_sender.py) is the trainer's end, `IncomingWeights` (weight_receiver.py) an engine's. Both take
part at the same time. They exchange keys of a small TCP store, which the sender serves, and the bytes of the weights:

    sender                                     store                                each receiver i
    open the channel                                                      ->  joined/i = ok
    first send: begun                            ->                           waits up to `patience` for it
    ----------------------------- the process group forms: gloo or nccl, not ipc -----------------------------
    fill a bucket, {version}/0 = header          ->                           allocate what the header asks for
    broadcast its bytes (ipc: leave them there)  =====================>       load the tensors
    fill the other bucket meanwhile              <-                           {version}/0/used/i = ok
    ...
    {version}/n = header with `end`              ->                           {version}/n/used/i = ok

A receiver acknowledges a bucket once its tensors have been used, so two buckets alternate: one is filled while the
other is read. A header is JSON and never a pickle, so a channel cannot make a receiver run code. Every wait has a
timeout, and its error names the side that did not respond. The process group is our own, because vLLM and DeepSpeed
each own torch's default one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from torch import distributed as dist

from openrlhf.errors import RolloutError

Transport = Literal["gloo", "nccl", "ipc"]

# Keys and values of the store, all below the channel's own key.
BEGUN = "begun"  # set by the first send: receivers wait for it up to `patience`, then join within `timeout`
CALLED_OFF = "called off"  # set from any process if a receiver will not join
JOINED = "joined"  # followed by the number of a receiver
OK = "ok"  # a receiver's acknowledgement; any other answer says what went wrong

CALL_OFF_SECONDS = 3.0  # for reaching the sender's store


@dataclass(frozen=True)
class Channel:
    """Address of a weight channel, and how its bytes travel. A `WeightSender` fills in port and key."""

    host: str  # an address of the sender's machine that the receivers can reach
    transport: Transport
    receivers: int  # number of processes, which are numbered from 0
    bucket_bytes: int = 1 << 28
    timeout: float = 120.0  # seconds
    patience: float = 24 * 3600.0  # seconds to wait for a version to start: the trainer may have to finish a step first
    port: int = 0
    key: str = ""  # unique, so that a channel formed again never sees the keys of an older one

    def connect(self, *, serve: bool = False) -> dist.TCPStore:
        """Connect to the store, or start it if `serve`."""
        return dist.TCPStore(
            self.host, self.port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=self.timeout)
        )

    def form_group(self, store: dist.Store, rank: int) -> dist.ProcessGroup | None:
        """Join the process group, in which the sender has rank 0; None for ipc, which sends no bytes.

        It is one of torch's backends; their type stubs lack the collectives, which those of ProcessGroup have.
        """
        if self.transport == "ipc":
            return None
        rendezvous, size = dist.PrefixStore(f"{self.key}/group", store), self.receivers + 1
        if self.transport == "nccl":
            nccl: Any = vars(dist)["ProcessGroupNCCL"]  # missing in CPU builds of PyTorch
            options = nccl.Options()
            # NCCL's own watchdog would end the process; our timeouts raise long before.
            options._timeout = timedelta(hours=24)
            return nccl(rendezvous, rank, size, options)
        # Gloo listens on the address that this machine has on its route to the sender's. Connecting a datagram socket
        # chooses the route, and sends nothing.
        family, *_, address = socket.getaddrinfo(self.host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own_address = str(probe.getsockname()[0])
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = [gloo.create_device(hostname=own_address)]
        return gloo(rendezvous, rank, size, options)

    def call_off(self) -> None:
        """Tell the sender, from any process, that a receiver will not join; do nothing if the sender is gone."""
        with suppress(OSError, dist.DistError):
            # A cheap probe first: torch logs loudly if there is no server to connect to.
            socket.create_connection((self.host, self.port), CALL_OFF_SECONDS).close()
            dist.PrefixStore(self.key, replace(self, timeout=CALL_OFF_SECONDS).connect()).set(CALLED_OFF, "")


@contextmanager
def blame(who: str) -> Iterator[None]:
    """Turn torch's errors within the context into a RolloutError that says which side did not respond, and how."""
    try:
        yield
    except RolloutError:
        raise
    except RuntimeError as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]  # torch may append a stack trace
        raise RolloutError(f"{who}: {first_line}") from None
