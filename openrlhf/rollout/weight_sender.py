"""The trainer's end of a weight channel: pack tensors into buckets, send them to all receivers, await their answers.

A worker process of the trainer opens a channel once (`cluster/actors.py`) and calls `WeightSender.send` for each new
version of the policy. `channel.py` has a diagram of the protocol.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import BackendError, RolloutError
from openrlhf.rollout.bucket import Bucket, Header
from openrlhf.rollout.channel import BEGUN, CALLED_OFF, JOINED, OK, Channel, blame
from openrlhf.rollout.engine import Checksums, Weights
from openrlhf.rollout.ipc import check_allocator, share_memory
from openrlhf.rollout.sync_proof import RecordedWeights

CALL_OFF_INTERVAL = 1.0  # seconds between checks for whether a waiting sender was called off


class WeightSender:
    """One sender, for any number of versions.

    If a receiver fails, the channel is closed and a new one must be created; if only the iterator of weights fails, the
    channel stays usable.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        if channel.transport == "ipc":
            if channel.receivers != 1:
                raise BackendError("an ipc channel has one receiver: make one channel for each GPU")
            check_allocator()
        self.root = channel.connect(serve=True)  # the server lives as long as this reference
        self.channel = replace(channel, port=self.root.port, key=uuid.uuid4().hex)
        self.store = dist.PrefixStore(self.channel.key, self.root)
        self.device = device
        self.group: dist.ProcessGroup | None = None  # stays None for ipc
        self.formed = False
        self.closed = False

    def send(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Send all weights to all receivers; return the checksums of what was sent if `verify`, else an empty dict."""
        if self.closed:
            raise BackendError("this weight channel failed or was closed: form a new one")
        sent = RecordedWeights(weights, verify=verify)
        try:
            if not self.formed:
                with blame("a weight receiver is gone"):
                    self.store.set(BEGUN, "")
                    self.await_receivers(JOINED, "did not join")
                    self.group = self.channel.form_group(self.root, 0)
                self.formed = True
            pipeline = BucketPipeline(self, version)
            try:
                for name, tensor in sent:
                    pipeline.add(name, tensor)
            except RolloutError:
                raise
            except BaseException as error:  # tell the receivers, whatever the iterator of weights raised
                pipeline.finish(f"{type(error).__name__}: {error}")
                raise
            pipeline.finish()
        except RolloutError:  # a receiver failed, so the others cannot be kept in step
            self.close()
            raise
        return sent.checksums

    def close(self) -> None:
        """Abort the process group and stop serving the store."""
        if self.closed:
            return
        self.closed = True
        if self.group is not None:
            self.group.abort()
        self.group = None
        del self.root, self.store

    def await_receivers(self, what: str, complaint: str) -> None:
        """Wait for an answer from each receiver; raise if one reports an error, is called off or is too late."""
        keys = [f"{what}/{number}" for number in range(self.channel.receivers)]
        deadline = time.monotonic() + self.channel.timeout
        while True:
            seconds = min(CALL_OFF_INTERVAL, max(0.001, deadline - time.monotonic()))
            try:
                self.store.wait(keys, timedelta(seconds=seconds))
                break
            except dist.DistError:
                missing = [str(number) for number, key in enumerate(keys) if not self.store.check([key])]
            silent = f"weight receiver{'s' if len(missing) > 1 else ''} {', '.join(missing)} {complaint}"
            if missing and self.store.check([CALLED_OFF]):
                raise RolloutError(f"{silent}, and will not")
            if missing and time.monotonic() > deadline:
                raise RolloutError(f"{silent} in {self.channel.timeout:g} s")
        for number, key in enumerate(keys):
            answer = self.store.get(key).decode()
            self.store.delete_key(key)
            if answer != OK:
                raise RolloutError(f"weight receiver {number} {answer}")


@dataclass(frozen=True)
class InTransit:
    """A header that was published but not yet acknowledged by all receivers."""

    number: int  # number of the header within its version
    bucket: Bucket | None  # None for the notice that ends a version
    broadcast: dist.Work | None  # None if no bytes are sent


class BucketPipeline:
    """One version on its way: two buckets that alternate between being filled and being read."""

    def __init__(self, sender: WeightSender, version: int) -> None:
        self.sender = sender
        self.version = version
        device = torch.device("cpu") if sender.channel.transport == "gloo" else sender.device
        size = sender.channel.bucket_bytes
        # The first of them is being filled.
        self.idle = deque(Bucket(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2))
        self.in_transit: deque[InTransit] = deque()
        self.count = 0  # headers published so far

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the current bucket, after sending that one off if it is full."""
        if not self.idle[0].add(name, tensor):
            self._ship()
            if not self.idle:
                self._await_oldest()
            self.idle[0].add(name, tensor)

    def finish(self, failure: str = "") -> None:
        """Send the last bucket and the end notice; after a `failure` of the iterator of weights, only the notice."""
        if not failure and self.idle[0].entries:
            self._ship()
        self._ship(Header(end=True, failure=failure))
        while self.in_transit:
            self._await_oldest()

    def _ship(self, notice: Header | None = None) -> None:
        """Publish the header of the current bucket and start broadcasting its bytes; or only publish a notice."""
        group, bucket, header = self.sender.group, None, notice
        if header is None:
            bucket = self.idle.popleft()
            header = Header(bucket.entries, bucket.used)
            if group is None:
                # The receiver reads the same memory, so the copies into the bucket must be complete.
                torch.cuda.current_stream(bucket.buffer.device).synchronize()
                header = replace(header, shared=share_memory(bucket.buffer))
        self.sender.store.set(f"{self.version}/{self.count}", header.encode())
        broadcast = None if bucket is None or group is None else group.broadcast(bucket.buffer[: bucket.used], 0)
        self.in_transit.append(InTransit(self.count, bucket, broadcast))
        self.count += 1

    def _await_oldest(self) -> None:
        """Wait until all receivers have used the oldest bucket in transit, and make it available again."""
        oldest = self.in_transit[0]
        key = f"{self.version}/{oldest.number}"
        if oldest.broadcast is not None:
            with blame("a weight receiver is gone"):
                oldest.broadcast.wait()
        self.sender.await_receivers(f"{key}/used", f"did not take bucket {oldest.number} of version {self.version}")
        self.sender.store.delete_key(key)
        self.in_transit.popleft()
        if oldest.bucket is not None:
            self.idle.append(Bucket(oldest.bucket.buffer))
