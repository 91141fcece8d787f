"""An engine's end of a weight channel: iterate over `IncomingWeights` to receive one version of the weights.

`group_sync.py` creates the `IncomingWeights`, a small picklable description, and passes it to the engine's `load`. The
process that iterates over it joins the channel, once for all versions. `channel.py` has a diagram of the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import RolloutError
from openrlhf.rollout.bucket import MIN_BUCKET, Header, unpack
from openrlhf.rollout.channel import OK, Channel, Rendezvous, blame
from openrlhf.rollout.ipc import open_memory

STOPPED = "stopped before it had loaded all weights"  # answer of a receiver that fails


@dataclass(frozen=True)
class IncomingWeights:
    """The weights of one version as they arrive at one receiver; pass it to `LoadingEngine.load` in any process.

    A tensor is a view of a bucket and valid only until the next one is requested: copy it to keep it longer.
    """

    channel: Channel
    number: int  # number of the receiver
    version: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        place = (self.channel.secret, self.number)
        if place not in _receivers:
            for old, receiver in tuple(_receivers.items()):
                if receiver.link.is_closed():
                    _receivers.pop(old).close()
            _receivers[place] = WeightReceiver(self.channel, self.number)
        try:
            failure = yield from _receivers[place].receive(self.version)
        except BaseException:  # including GeneratorExit: a receiver with part of a version cannot be used again
            receiver = _receivers.pop(place, None)
            if receiver is not None:
                receiver.close()
            raise
        if failure:  # the channel is still usable for another version
            raise RolloutError(f"the weight sender failed: {failure}")


@dataclass(frozen=True)
class WeightsPerWorker:
    """The weights of one version for an engine with several workers: each iterates over its own `IncomingWeights`."""

    by_worker: tuple[IncomingWeights, ...]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for an engine that runs in a single process."""
        return iter(self.by_worker[0])


class WeightReceiver:
    """A receiver that has joined a channel; it is reused for later versions."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.buffer: Tensor | None = None  # [bytes]
        self.sender = f"the weight sender at {channel.host}"
        self.group: dist.ProcessGroup | None = None  # only with nccl; formed when the first bytes arrive
        # Keep a reference, because the group does not.
        self.rendezvous = Rendezvous(read=lambda: self.link.receive(channel.timeout))
        with blame(f"{self.sender} did not accept receiver {number}"):
            self.link = channel.join(number)

    def receive(self, version: int) -> Generator[tuple[str, Tensor], None, str]:
        """Yield the tensors of all buckets; return why they are incomplete, or an empty string."""
        number = 0
        while True:
            header = self._receive_header(version, number)
            if header.end:
                self.buffer = None
                with blame(f"lost the connection to {self.sender}"):
                    self.link.send(OK.encode(), self.channel.timeout)
                return header.failure
            shared, answer = header.shared, STOPPED
            try:
                buffer = self._receive_bytes(header.used) if shared is None else open_memory(shared)  # [bytes]
                yield from unpack(header, buffer)
                if buffer.is_cuda:  # copies out of the buffer must be complete before it is used again
                    torch.cuda.current_stream().synchronize()
                answer = OK
            finally:
                if shared is not None or answer is not OK:  # the sender waits until its own memory is no longer read
                    with suppress(OSError):  # a sender that has exited needs no answer
                        self.link.send(answer.encode(), self.channel.timeout)
            number += 1

    def _receive_header(self, version: int, number: int) -> Header:
        """Wait for the next header, longer for the first one of a version, because the trainer may be busy."""
        seconds = self.channel.timeout if number else self.channel.patience
        with blame(f"{self.sender} closed the channel: the sender or another receiver failed, or one did not join"):
            try:
                header = Header.decode(self.link.receive(seconds))
            except TimeoutError:
                raise RolloutError(
                    f"{self.sender} did not send the next weights within {seconds:g} s (header {number} of version"
                    f" {version})"
                ) from None
        if header.version != version:
            raise RolloutError(f"{self.sender} sent wrong weights: expected version {version}, got {header.version}")
        return header

    def _receive_bytes(self, size: int) -> Tensor:
        """Receive the bytes of a bucket into the buffer, which grows if necessary; return them [size]."""
        if self.buffer is None or self.buffer.numel() < size:
            rounded = -(-size // MIN_BUCKET) * MIN_BUCKET  # so that a slightly larger bucket also fits
            self.buffer = torch.empty(rounded, dtype=torch.uint8, device=self.channel.receiving_device)
        received = self.buffer[:size]
        with blame(f"{self.sender} stopped in the middle of a bucket"):
            if self.channel.transport == "tcp":
                self.link.receive_raw(received.numpy().data, self.channel.timeout)
            else:
                self._receive_broadcast(received)
        return received

    def _receive_broadcast(self, received: Tensor) -> None:
        """Receive the bytes [size] by NCCL."""
        if self.group is None:
            self.group = self.channel.form_group(self.rendezvous, 1 + self.number)
        broadcast = self.group.broadcast(received, 0)
        deadline = time.monotonic() + self.channel.timeout
        # Wait on the host: an NCCL call that never ends would block the device silently.
        while not broadcast.is_completed():
            if time.monotonic() > deadline:
                raise RolloutError(f"the weight sender did not complete a bucket within {self.channel.timeout:g} s")
            time.sleep(0.0005)
        broadcast.wait()

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        self.link.close()


_receivers: dict[tuple[bytes, int], WeightReceiver] = {}  # receivers of this process, by channel secret and number
