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
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import BackendError, RolloutError
from openrlhf.rollout.bucket import Bucket, Header, bucket_size, free_memory
from openrlhf.rollout.channel import OK, Channel, Join, Rendezvous, blame
from openrlhf.rollout.engine import Checksums, Weights
from openrlhf.rollout.ipc import check_allocator, share_memory
from openrlhf.rollout.link import Link, LinkServer
from openrlhf.rollout.sync_proof import RecordedWeights

POLL_SECONDS = 0.001  # seconds between checks for a sent bucket; an answer ends the wait earlier
SECRET_BYTES = 32
SHOWN = 8  # maximum receivers to name in a message

Sending: TypeAlias = dict[int, Future[None]]  # bytes on their way, by number of the receiver; only for tcp


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
        self.links = selectors.DefaultSelector()  # connections of the receivers, to read their answers
        self.model_bytes = 0  # sent for the last complete version
        self.questions = 0  # messages so far that each receiver answers
        secret = secrets.token_bytes(SECRET_BYTES)
        self.server = LinkServer(channel.host, secret, self._accept, channel.receivers)
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
                self.receivers[join.number] = Receiver(join, link)
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
        self.links.close()

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
        for number, receiver in self.receivers.items():
            self.links.register(receiver.link, selectors.EVENT_READ, number)
        if self.channel.transport == "nccl":
            with blame("lost the connection to a weight receiver"):
                self.group = self.channel.form_group(self.rendezvous, 0)

    def start_broadcast(self, data: Tensor) -> dist.Work:
        """Start broadcasting bytes [size] by NCCL, after the device has finished copying into them."""
        if self.group is None:
            raise BackendError("this weight channel has no NCCL group: its transport is not nccl, or it was closed")
        return self.group.broadcast(data, 0)

    def publish(self, message: bytes, data: Tensor | None = None) -> Sending:
        """Send all receivers a message and, over TCP, the bytes [size] after it; over TCP, threads do the sending."""
        return self.publish_each([message] * len(self.receivers), data)

    def publish_each(self, messages: Iterable[bytes], data: Tensor | None = None) -> Sending:
        """Send each receiver its own message, followed by the same bytes for all."""
        self._read_answers(0.0)
        seconds = self.channel.timeout
        sending: Sending = {}
        for (number, receiver), message in zip(self.receivers.items(), messages, strict=True):
            if self.channel.transport == "tcp":
                sending[number] = receiver.start_sending(message, data, seconds)
                continue
            try:  # no thread is needed: a socket accepts a header without waiting for the receiver
                receiver.link.send(message, seconds)
            except OSError as error:
                raise RolloutError(f"lost the connection to weight receiver {number}: {error}") from None
        return sending

    def await_receivers(self, pending: Callable[[], Collection[int]], complaint: str) -> None:
        """Wait until no receiver is `pending`, and count answers as they arrive.

        Raise if a receiver reports an error, disconnects or takes too long, or if the channel is called off.
        """
        deadline = time.monotonic() + self.channel.timeout
        self._read_answers(0.0)  # a reported error is more informative than the connection that it closes
        while missing := pending():
            if self.called_off:
                raise RolloutError(f"{listed(missing)} {complaint} before the weight sync was called off")
            if time.monotonic() > deadline:
                raise RolloutError(f"{listed(missing)} {complaint} within {self.channel.timeout:g} s")
            self._read_answers(POLL_SECONDS)

    def _read_answers(self, seconds: float) -> None:
        """Count the answers that have arrived, after waiting this long for the first; raise if one is an error."""
        for key, _ in self.links.select(seconds):
            with blame(f"lost the connection to weight receiver {key.data}"):
                answer = self.receivers[key.data].link.receive(self.channel.timeout).decode(errors="replace")
            if answer != OK:
                raise RolloutError(f"weight receiver {key.data} {answer}")
            self.receivers[key.data].answers += 1


class Receiver:
    """The connection to a receiver, and a thread that sends, so that slow receivers do not delay the others."""

    def __init__(self, join: Join, link: Link) -> None:
        self.link = link
        self.room = join.room
        self.answers = 0  # answers to all versions so far
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"openrlhf-receiver-{join.number}")

    def start_sending(self, message: bytes, data: Tensor | None, seconds: float) -> Future[None]:
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
    """A bucket whose memory may still be read, or a notice that has not been answered yet."""

    name: str  # for messages
    bucket: Bucket | None  # None for a notice
    sending: Sending
    broadcast: dist.Work | None  # only for nccl
    answers: int | None  # number of answers after which a receiver is done with it; None if receivers do not answer

    def pending(self, receivers: Mapping[int, Receiver]) -> Collection[int]:
        """Return the numbers of the receivers that have not received it."""
        for number, sent in self.sending.items():
            if sent.done():
                with blame(f"lost the connection to weight receiver {number}"):
                    sent.result()
        if self.answers is not None:
            return [number for number, receiver in receivers.items() if receiver.answers < self.answers]
        if self.broadcast is not None:  # NCCL does not report which receiver is late
            return [] if self.broadcast.is_completed() else receivers.keys()
        return [number for number, sent in self.sending.items() if not sent.done()]


class BucketPipeline:
    """The transfer of one version through two buckets: one is filled while the other is sent."""

    def __init__(self, sender: WeightSender, version: int) -> None:
        self.sender = sender
        self.version = version
        device = torch.device("cpu") if sender.channel.transport == "tcp" else sender.device
        free_bytes = (free_memory(device), *(receiver.room for receiver in sender.receivers.values()))
        known = [free for free in free_bytes if free is not None]
        size = bucket_size(sender.channel.largest_bucket, sender.model_bytes, known)
        # The first bucket is being filled.
        self.idle = deque(Bucket(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2))
        self.in_transit: deque[InTransit] = deque()
        self.count = 0  # buckets sent so far
        self.sent_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the current bucket; if it does not fit, send this bucket and use the next one."""
        if not self.idle[0].add(name, tensor):
            self._send_bucket()
            if not self.idle:
                self._await_oldest()
            self.idle[0].add(name, tensor)

    def finish(self, failure: str = "") -> None:
        """Send the last bucket and the end notice, or only the notice after a `failure` of the iterator of weights."""
        if not failure and self.idle[0].entries:
            self._send_bucket()
        sending = self.sender.publish(Header(self.version, end=True, failure=failure).encode())
        self.in_transit.append(InTransit("the end", None, sending, None, self._next_answer()))
        while self.in_transit:
            self._await_oldest()
        if not failure:
            self.sender.model_bytes = self.sent_bytes

    def _send_bucket(self) -> None:
        """Publish the header of the current bucket and start sending its bytes."""
        sender, bucket = self.sender, self.idle.popleft()
        header, used = Header(self.version, bucket.entries, bucket.used), bucket.buffer[: bucket.used]
        sending: Sending = {}
        broadcast, answers = None, None
        match sender.channel.transport:
            case "tcp":
                sending = sender.publish(header.encode(), used)
            case "nccl":
                sender.publish(header.encode())
                with blame("lost the connection to a weight receiver"):
                    broadcast = sender.start_broadcast(used)
            case "ipc":
                # Receivers read the same memory, so the copies into the bucket must be complete. Torch counts the
                # readers of a description, and only one process may open it: each receiver gets its own.
                torch.cuda.current_stream(used.device).synchronize()
                shares = [share_memory(bucket.buffer) for _ in sender.receivers]
                sender.publish_each(replace(header, shared=share).encode() for share in shares)
                answers = self._next_answer()
        self.in_transit.append(InTransit(f"bucket {self.count}", bucket, sending, broadcast, answers))
        self.count += 1
        self.sent_bytes += bucket.used

    def _next_answer(self) -> int:
        """Return how many answers each receiver will have given once it has answered the next message."""
        self.sender.questions += 1
        return self.sender.questions

    def _await_oldest(self) -> None:
        """Wait until the oldest bucket in transit is no longer read, and make it available again."""
        oldest = self.in_transit[0]
        self.sender.await_receivers(
            lambda: oldest.pending(self.sender.receivers), f"did not take {oldest.name} of version {self.version}"
        )
        if oldest.broadcast is not None:
            with blame("lost the connection to a weight receiver"):
                oldest.broadcast.wait()
        self.in_transit.popleft()
        if oldest.bucket is not None:
            self.idle.append(Bucket(oldest.bucket.buffer))


def listed(numbers: Iterable[int]) -> str:
    """Return the names of receivers for a message."""
    found = sorted(numbers)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"weight receiver{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:SHOWN]))}{more}"
