"""The trainer's end of a weight channel: pack tensors into buckets, send them to all receivers, wait for their answers.

The process with the policy (`cluster/actors.py`, `rl/local_engines.py`) opens a channel once and calls
`WeightSender.send` for each new version. `channel.py` has a diagram of the protocol.
"""

from __future__ import annotations

import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import BackendError, RolloutError
from openrlhf.rollout.bucket import Bucket, Header
from openrlhf.rollout.channel import OK, Channel, Join, Rendezvous, blame
from openrlhf.rollout.engine import Checksums, Weights
from openrlhf.rollout.ipc import check_allocator, share_memory
from openrlhf.rollout.link import Link, LinkServer
from openrlhf.rollout.sync_proof import RecordedWeights

CALL_OFF_INTERVAL = 1.0  # seconds between checks of whether the channel was called off
SECRET_BYTES = 32


class WeightSender:
    """Sender of weights to the receivers of a channel, for any number of versions.

    If a receiver fails, the channel is closed and a new one must be created; if only the iterator of weights fails, the
    channel stays usable.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        if channel.transport == "ipc":
            check_allocator()
        self.device = device
        self.receivers: dict[int, Receiver] = {}  # receivers that have joined, by number
        self.changed = threading.Condition()  # notified when a receiver joins or the channel is called off
        self.called_off = False
        self.group: dist.ProcessGroup | None = None  # only for nccl
        self.rendezvous = Rendezvous(publish=self.publish)  # keep a reference, because the group does not
        self.formed = False
        self.closed = False
        secret = secrets.token_bytes(SECRET_BYTES)
        self.server = LinkServer(channel.host, secret, self._accept)
        self.channel = replace(channel, port=self.server.port, secret=secret)

    def _accept(self, link: Link) -> None:
        """Read the first message of a new connection."""
        join = Join.decode(link.receive(self.channel.timeout))
        with self.changed:
            if join.number is None:
                self.called_off = True
                link.close()
            elif self.closed or self.formed or join.number not in range(self.channel.receivers):
                link.close()
            else:
                if join.number in self.receivers:  # the receiver has reconnected
                    self.receivers[join.number].close()
                self.receivers[join.number] = Receiver(join.number, link)
            self.changed.notify_all()

    def send(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Send all weights to all receivers; return checksums of the sent tensors if `verify`, else an empty dict."""
        if self.closed:
            raise BackendError("this weight channel failed or was closed: create a new one")
        sent = RecordedWeights(weights, verify=verify)
        try:
            if not self.formed:
                self._await_joins()
            pipeline = BucketPipeline(self, version)
            try:
                for name, tensor in sent:
                    pipeline.add(name, tensor)
            except RolloutError:
                raise
            except BaseException as error:  # notify the receivers of any error in the iterator of weights
                pipeline.finish(f"{type(error).__name__}: {error}")
                raise
            pipeline.finish()
        except RolloutError:  # a receiver failed, so the channel cannot be used again
            self.close()
            raise
        return sent.checksums

    def close(self) -> None:
        """Abort the process group and close all connections."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
        if self.group is not None:
            self.group.abort()
        self.group = None
        self.server.close()
        for receiver in self.receivers.values():
            receiver.close()

    def _await_joins(self) -> None:
        """Wait until all receivers have joined, and form their process group."""
        deadline = time.monotonic() + self.channel.timeout
        with self.changed:
            while missing := sorted(set(range(self.channel.receivers)) - self.receivers.keys()):
                if self.called_off:
                    raise RolloutError(f"{listed(missing)} did not join before the weight sync was called off")
                if not self.changed.wait(deadline - time.monotonic()):
                    raise RolloutError(f"{listed(missing)} did not join within {self.channel.timeout:g} s")
            self.formed = True
        if self.channel.transport == "nccl":
            with blame("lost the connection to a weight receiver"):
                self.group = self.channel.form_group(self.rendezvous, 0)

    def publish(self, message: bytes, data: Tensor | None = None) -> list[Future[None]]:
        """Start sending a message, and any bytes that follow it, to all receivers."""
        return self.publish_each([message] * len(self.receivers), data)

    def publish_each(self, messages: Iterable[bytes], data: Tensor | None = None) -> list[Future[None]]:
        """Start sending each receiver its own message, and all of them the bytes that follow."""
        pairs = zip(self.receivers.values(), messages, strict=True)
        return [receiver.send(message, data, self.channel.timeout) for receiver, message in pairs]

    def await_answers(self, sending: Sequence[Future[None]], complaint: str) -> None:
        """Wait for an answer from each receiver to the message that `sending` sends.

        Raise if a receiver reports an error, disconnects or answers too late, or if the channel is called off.
        """
        deadline = time.monotonic() + self.channel.timeout
        missing = set(self.receivers)
        with selectors.DefaultSelector() as links:
            for number, receiver in self.receivers.items():
                links.register(receiver.link, selectors.EVENT_READ, number)
            while missing:
                for key, _ in links.select(min(CALL_OFF_INTERVAL, max(0.001, deadline - time.monotonic()))):
                    with blame(f"lost the connection to weight receiver {key.data}"):
                        answer = self.receivers[key.data].link.receive(self.channel.timeout).decode(errors="replace")
                    if answer != OK:
                        raise RolloutError(f"weight receiver {key.data} {answer}")
                    missing.remove(key.data)
                    links.unregister(key.fileobj)
                for number, sent in zip(self.receivers, sending, strict=True):
                    if sent.done():
                        with blame(f"lost the connection to weight receiver {number}"):
                            sent.result()
                if missing and self.called_off:
                    raise RolloutError(f"{listed(missing)} {complaint} before the weight sync was called off")
                if missing and time.monotonic() > deadline:
                    raise RolloutError(f"{listed(missing)} {complaint} within {self.channel.timeout:g} s")


class Receiver:
    """A receiver that joined: its connection, and a thread that sends, so that a slow one does not delay the others."""

    def __init__(self, number: int, link: Link) -> None:
        self.link = link
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"openrlhf-receiver-{number}")

    def send(self, message: bytes, data: Tensor | None, seconds: float) -> Future[None]:
        """Start sending a message and the bytes [size] that follow it; messages keep their order."""

        def send() -> None:
            self.link.send(message, seconds)
            if data is not None:
                self.link.send_raw(data.numpy().data, seconds)

        return self.thread.submit(send)

    def close(self) -> None:
        self.link.close()
        self.thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class InTransit:
    """A header that was published but not yet acknowledged by all receivers."""

    number: int  # number of the header within its version
    bucket: Bucket | None  # None for the notice that ends a version
    sending: Sequence[Future[None]]
    broadcast: dist.Work | None  # None if the bytes are not broadcast


class BucketPipeline:
    """The transfer of one version through two buckets: one is filled while receivers read the other."""

    def __init__(self, sender: WeightSender, version: int) -> None:
        self.sender = sender
        self.version = version
        device = torch.device("cpu") if sender.channel.transport == "tcp" else sender.device
        size = sender.channel.bucket_bytes
        # The first bucket is being filled.
        self.idle = deque(Bucket(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2))
        self.in_transit: deque[InTransit] = deque()
        self.count = 0  # headers published so far

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the current bucket; if it does not fit, send this bucket and use the next one."""
        if not self.idle[0].add(name, tensor):
            self._ship()
            if not self.idle:
                self._await_oldest()
            self.idle[0].add(name, tensor)

    def finish(self, failure: str = "") -> None:
        """Send the last bucket and the end notice, or only the notice after a `failure` of the iterator of weights."""
        if not failure and self.idle[0].entries:
            self._ship()
        self._ship(Header(self.version, end=True, failure=failure))
        while self.in_transit:
            self._await_oldest()

    def _ship(self, notice: Header | None = None) -> None:
        """Publish the header of the current bucket and start sending its bytes, or only publish a notice."""
        sender, bucket, header, data = self.sender, None, notice, None
        if header is None:
            bucket = self.idle.popleft()
            header = Header(self.version, bucket.entries, bucket.used)
        if bucket is not None and sender.channel.transport == "ipc":
            # Receivers read the same memory, so the copies into the bucket must be complete. Torch counts the readers
            # of a description, and only one process may open it: each receiver gets its own.
            torch.cuda.current_stream(bucket.buffer.device).synchronize()
            shares = [share_memory(bucket.buffer) for _ in sender.receivers]
            sending = sender.publish_each(replace(header, shared=share).encode() for share in shares)
        else:
            if bucket is not None and sender.channel.transport == "tcp":
                data = bucket.buffer[: bucket.used]
            sending = sender.publish(header.encode(), data)
        group = sender.group
        broadcast = None
        if bucket is not None and group is not None:
            with blame("lost the connection to a weight receiver"):
                broadcast = group.broadcast(bucket.buffer[: bucket.used], 0)
        self.in_transit.append(InTransit(self.count, bucket, sending, broadcast))
        self.count += 1

    def _await_oldest(self) -> None:
        """Wait until all receivers have used the oldest bucket in transit, and make it available again."""
        oldest = self.in_transit[0]
        if oldest.broadcast is not None:
            with blame("lost the connection to a weight receiver"):
                oldest.broadcast.wait()
        complaint = f"did not acknowledge bucket {oldest.number} of version {self.version}"
        self.sender.await_answers(oldest.sending, complaint)
        self.in_transit.popleft()
        if oldest.bucket is not None:
            self.idle.append(Bucket(oldest.bucket.buffer))


def listed(numbers: Iterable[int]) -> str:
    """Return the names of receivers for a message."""
    found = sorted(numbers)
    return f"weight receiver{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
