"""An engine's end of a weight channel: iterate over `IncomingWeights` to receive one version of the weights.

`cluster/weight_sync.py` creates the `IncomingWeights`, a small picklable description, and passes it to the engine's
`load`. The process that iterates over it joins the channel, once for all versions. `channel.py` has a diagram of the
protocol.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import RolloutError
from openrlhf.rollout.bucket import Header, unpack
from openrlhf.rollout.channel import BEGUN, JOINED, OK, Channel, blame
from openrlhf.rollout.ipc import open_memory


@dataclass(frozen=True)
class IncomingWeights:
    """The weights of one version as they arrive at one receiver; `LoadingEngine.load` takes it, in any process.

    A tensor is a view of a bucket and valid only until the next one is requested: copy it to keep it longer.
    """

    channel: Channel
    number: int  # of the receiver
    version: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        place = (self.channel.key, self.number)
        if place not in _receivers:
            for old, receiver in tuple(_receivers.items()):
                try:
                    receiver.store.check([BEGUN])
                except dist.DistError:  # the sender's store no longer answers
                    _receivers.pop(old).close()
            _receivers[place] = WeightReceiver(self.channel, self.number)
        try:
            failure = yield from _receivers[place].receive(self.version)
        except BaseException:  # GeneratorExit too: after a part of a version, the receiver cannot be used again
            receiver = _receivers.pop(place, None)
            if receiver is not None:
                receiver.close()
            raise
        if failure:  # the channel is intact and may carry another version
            raise RolloutError(f"the weight sender failed: {failure}")


@dataclass(frozen=True)
class WeightsPerWorker:
    """The weights of one version for an engine with several workers: each iterates over its own `IncomingWeights`."""

    by_worker: tuple[IncomingWeights, ...]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for an engine that runs in a single process."""
        return iter(self.by_worker[0])


class WeightReceiver:
    """A receiver that joined a channel, kept between versions."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.buffer: Tensor | None = None  # [bytes]
        self.sender = f"the weight sender at {channel.host}"
        with blame(f"{self.sender} or another receiver did not join in {channel.timeout:g} s"):
            root = channel.connect()
            self.store = dist.PrefixStore(channel.key, root)
            self.store.set(f"{JOINED}/{number}", OK)
            self._await_key(BEGUN, channel.patience, "did not begin")
            self.group = channel.form_group(root, 1 + number)

    def receive(self, version: int) -> Generator[tuple[str, Tensor], None, str]:
        """Yield the tensors of all buckets; return why they are incomplete, or an empty string."""
        number = 0
        while True:
            key = f"{version}/{number}"
            seconds = self.channel.timeout if number else self.channel.patience
            header = Header.decode(self._await_key(key, seconds, f"sent no header {key}"))
            if header.end:
                self.buffer = None
                self.store.set(f"{key}/used/{self.number}", OK)
                return header.failure
            answer = "stopped before the end"
            try:
                shared = header.shared
                buffer = self._receive_bytes(header.used) if shared is None else open_memory(shared)  # [bytes]
                yield from unpack(header, buffer)
                if buffer.is_cuda:  # copies out of the buffer must be complete before they are acknowledged
                    torch.cuda.current_stream().synchronize()
                answer = OK
            finally:
                with suppress(dist.DistError):  # a sender that is gone needs no answer
                    self.store.set(f"{key}/used/{self.number}", answer)
            number += 1

    def _receive_bytes(self, size: int) -> Tensor:
        """Receive the broadcast of a bucket into the buffer, which grows if necessary; return its bytes [size]."""
        assert self.group is not None
        if self.buffer is None or self.buffer.numel() < size:
            device = torch.device("cuda", torch.cuda.current_device()) if self.channel.transport == "nccl" else None
            self.buffer = torch.empty(max(size, self.channel.bucket_bytes), dtype=torch.uint8, device=device)
        received = self.buffer[:size]
        broadcast = self.group.broadcast(received, 0)
        deadline = time.monotonic() + self.channel.timeout
        with blame(f"{self.sender} stopped in the middle of a bucket"):
            if self.channel.transport == "gloo":
                broadcast.wait()
            # Wait on the host: an NCCL call that never ends would block the device silently.
            while not broadcast.is_completed():
                if time.monotonic() > deadline:
                    raise RolloutError(f"the weight sender paused within a bucket for {self.channel.timeout:g} s")
                time.sleep(0.0005)
            broadcast.wait()
        return received

    def _await_key(self, key: str, seconds: float, complaint: str) -> bytes:
        """Wait for a key of the store; return its value."""
        with blame(f"{self.sender} {complaint} in {seconds:g} s"):
            self.store.wait([key], timedelta(seconds=seconds))
            return self.store.get(key)

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()


_receivers: dict[tuple[str, int], WeightReceiver] = {}  # this process's, by key of the channel and number
