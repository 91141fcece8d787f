"""The channel that sends weights from one trainer process to the workers of inference engines.

`WeightSender` (weight_sender.py) is the trainer's end, `IncomingWeights` (weight_receiver.py) an engine's. Both run at
the same time. Each receiver has one authenticated connection (link.py) to the sender:

    sender                                                                    each receiver i
    open the channel: listen on `host`                                    <-  connect, joined i
    fill a bucket, header 0                      ->                           allocate a buffer of that size
    its bytes (tcp: on the link; nccl: broadcast; ipc: shared memory)     ->  load the tensors (ipc: then ok)
    fill the other bucket at the same time
    ...
    header n with `end`                          ->                           ok

Two buckets alternate: one is filled while the other is sent. A bucket is free again once its bytes have been sent,
which the sender knows without an answer: the sockets accepted them, or the broadcast is complete. So a receiver answers
once per version, and the sender's work per bucket does not grow with answers. Only a receiver that reads the sender's
own memory (ipc) also acknowledges each bucket; such a channel has a few receivers, on one GPU. A receiver that fails
reports its error on its connection or closes it; the sender checks for this during every wait.

Messages are JSON and never pickles, so a channel cannot make a process run code, and only processes that got the
channel's secret from the sender can join it. Every wait has a timeout, and its error names the side that did not
respond. NCCL gets a separate process group, because torch's default one belongs to vLLM or DeepSpeed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed as dist

from openrlhf.errors import RolloutError, first_line
from openrlhf.rollout.bucket import MAX_BUCKET, USUAL_BUCKET, free_memory
from openrlhf.rollout.link import Link, connect

Transport = Literal["tcp", "nccl", "ipc"]

OK = "ok"  # a receiver's answer; any other describes an error
CALL_OFF_SECONDS = 3.0  # timeout for notifying the sender that a receiver will not join


@dataclass(frozen=True)
class Channel:
    """Address, transport and limits of a weight channel. A `WeightSender` sets the port and the secret."""

    host: str  # an address of the sender's machine that the receivers can reach; the sender listens only there
    transport: Transport
    receivers: int  # number of processes, which are numbered from 0
    bucket_bytes: int = MAX_BUCKET  # maximum; see `bucket_size`
    timeout: float = 120.0  # seconds
    patience: float = 24 * 3600.0  # seconds to wait for the next version: the trainer may be in a long step
    port: int = 0
    secret: bytes = field(default=b"", repr=False)  # new for each channel; a process that has it can join

    def join(self, number: int) -> Link:
        """Connect to the sender as receiver `number`."""
        link = connect(self.host, self.port, self.secret, self.timeout)
        link.send(Join(number, free_memory(self.receiving_device)).encode(), self.timeout)
        return link

    @property
    def largest_bucket(self) -> int:
        """Maximum bytes of a bucket; sending a larger one through a slow network card may exceed `timeout`."""
        return min(self.bucket_bytes, USUAL_BUCKET) if self.transport == "tcp" else self.bucket_bytes

    @property
    def receiving_device(self) -> torch.device:
        """Device of a receiver's buffer, in the process of the receiver."""
        return torch.device("cuda", torch.cuda.current_device()) if self.transport == "nccl" else torch.device("cpu")

    def call_off(self) -> None:
        """Notify the sender, from any process, that a receiver will not join; do nothing if the sender has exited."""
        with suppress(OSError):
            link = connect(self.host, self.port, self.secret, CALL_OFF_SECONDS)
            link.send(Join(None).encode(), CALL_OFF_SECONDS)
            link.close()

    def form_group(self, store: dist.Store, rank: int) -> dist.ProcessGroup:
        """Join the NCCL group, in which the sender has rank 0.

        The result is a torch backend, annotated as ProcessGroup because the stubs of backends lack the collectives.
        """
        # Above this size, torch would collect ids from several ranks, but `Rendezvous` transfers only the sender's.
        os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(max(128, self.receivers + 1))
        nccl: Any = vars(dist)["ProcessGroupNCCL"]  # missing in CPU builds of PyTorch
        options = nccl.Options()
        # NCCL's own watchdog would end the process; our timeouts raise an error long before.
        options._timeout = timedelta(hours=24)
        # Otherwise a receiver that dies before the first broadcast would block the others forever.
        options.config.blocking = 0
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(max(1, int(self.timeout)))
        return nccl(store, rank, self.receivers + 1, options)


@dataclass(frozen=True)
class Join:
    """First message on a connection."""

    number: int | None  # number of the receiver, or None to call the channel off
    room: int | None = None  # free bytes on the GPU of the receiver's buffer; None in host memory

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Join:
        return cls(**json.loads(message))


class Rendezvous(dist.Store):
    """Store through which the ranks of an NCCL group find each other; the sender's entries are sent over the links.

    A process with NCCL's id can join the group, so the id must not be in a store that others can read.
    """

    def __init__(self, publish: Callable[[bytes], object] | None = None, read: Callable[[], bytes] | None = None):
        super().__init__()
        self.publish, self.read = publish, read

    def set(self, key: str, value: bytes | str) -> None:
        if self.publish is not None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            self.publish(json.dumps({"key": key, "value": data.hex()}).encode())

    def get(self, key: str) -> bytes:
        assert self.read is not None
        message = json.loads(self.read())
        if message.get("key") != key:
            raise RolloutError(f"the weight sender sent a wrong key: expected {key!r}, got {message.get('key')!r}")
        return bytes.fromhex(message["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing: `get` waits."""

    def check(self, keys: list[str]) -> bool:
        """Return False: torch's monitor checks for requests to dump its state, and there are none."""
        return False


@contextmanager
def blame(who: str) -> Iterator[None]:
    """Turn errors of links and of torch into a RolloutError that says which side failed, and why."""
    try:
        yield
    except RolloutError:
        raise
    except (RuntimeError, OSError) as error:
        raise RolloutError(f"{who}: {first_line(error)}") from None  # torch may append a stack trace
