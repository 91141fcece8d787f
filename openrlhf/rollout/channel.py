"""Transfer of weights from a trainer process to engine processes, in large buckets.

Both sides take part at the same time: the trainer calls `Sender.send` while each engine iterates over an `Incoming`.
Headers and acknowledgements go through a small TCP store that the sender serves. The bytes are broadcast (gloo, nccl)
in a process group of our own, because vLLM and DeepSpeed each own the default one, or (ipc) stay in place on the GPU
that both sides share. A receiver acknowledges a bucket once its tensors have been used, so two buckets alternate: one
is filled while the other is read. Every wait has a timeout, and its error names the side that did not respond.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from openrlhf.errors import BackendError, RolloutError
from openrlhf.rollout.bucket import Bucket, Header, unpack
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.engine import Checksums, Weights
from openrlhf.rollout.ipc import check_allocator, describe, open_mapping

Transport = Literal["gloo", "nccl", "ipc"]
CALLED_OFF = "called off"
BEGUN = "begun"  # set by the first send: receivers wait for it up to `patience`, then join within `timeout`
SECONDS_TO_CALL = 3.0
SECONDS_BETWEEN_LOOKS = 1.0  # between two checks whether a waiting sender was called off
OK = "ok"  # a receiver's acknowledgement; any other answer says what went wrong


@dataclass(frozen=True)
class Channel:
    """Address of a weight channel, and how its bytes travel. A `Sender` fills in port and key when it serves it."""

    host: str  # an address of the sender's machine that the receivers can reach
    transport: Transport
    receivers: int  # number of processes, which are numbered from 0
    bucket_bytes: int = 1 << 28
    timeout: float = 120.0  # seconds
    patience: float = 24 * 3600.0  # seconds for a version to begin: the trainer may have to finish a step first
    port: int = 0
    key: str = ""  # unique, so that a channel formed again never sees the keys of an older one

    def connect(self, *, serve: bool = False) -> dist.Store:
        """Connect to the store, or start it if `serve`."""
        return dist.TCPStore(
            self.host, self.port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=self.timeout)
        )

    def group(self, store: dist.Store, rank: int) -> Any:
        """Create the process group of this channel; None for ipc, which sends no bytes."""
        if self.transport == "ipc":
            return None
        meeting = dist.PrefixStore(f"{self.key}/group", store)
        size = self.receivers + 1
        if self.transport == "nccl":
            return _nccl_group(meeting, rank, size)
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = [kind.create_device(hostname=_own_address(self.host))]
        return kind(meeting, rank, size, options)

    def call_off(self) -> None:
        """Tell the sender, from any process, that a receiver will not come; do nothing if the sender is gone."""
        with suppress(OSError, dist.DistError):
            # A cheap probe first: torch logs loudly if there is no server to connect to.
            socket.create_connection((self.host, self.port), SECONDS_TO_CALL).close()
            dist.PrefixStore(self.key, replace(self, timeout=SECONDS_TO_CALL).connect()).set(CALLED_OFF, "")

    def bucket_device(self, device: torch.device) -> torch.device:
        """Return the device for buckets: gloo sends from host memory."""
        return torch.device("cpu") if self.transport == "gloo" else device


class Sender:
    """The trainer's end of a channel.

    If a receiver fails, the channel is closed and a new one must be created; if only the iterator of weights fails, the
    channel stays usable.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        if channel.transport == "ipc":
            if channel.receivers != 1:
                raise BackendError("an ipc channel has one receiver: make one channel for each GPU")
            check_allocator()
        store: Any = channel.connect(serve=True)
        self.channel = replace(channel, port=store.port, key=uuid.uuid4().hex)
        self.root: Any = store  # the server lives as long as this reference
        self.store: Any = dist.PrefixStore(self.channel.key, store)
        self.device = device
        self.group: Any = None
        self.joined = False
        self.closed = False

    def send(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Send all weights to all receivers; return the checksums of what was sent if `verify`, else an empty dict."""
        if self.closed:
            raise BackendError("this weight channel failed or was closed: form a new one")
        self._meet()
        parcel = _Parcel(self, version)
        sums: dict[str, int] = {}
        try:
            for name, tensor in weights:
                parcel.add(name, tensor)
                if verify:
                    sums[name] = checksum(tensor)
        except RolloutError:  # a receiver failed, so the others cannot be kept in step
            self.close()
            raise
        except BaseException as error:
            parcel.finish(f"{type(error).__name__}: {error}")
            raise
        parcel.finish()
        return sums

    def close(self) -> None:
        """Abort the process group and stop serving the store."""
        self.closed = True
        if self.group is not None:
            self.group.abort()
        self.group = None
        self.root = self.store = None

    def _meet(self) -> None:
        """On the first send, wait for all receivers to join and form the process group."""
        if self.joined:
            return
        try:
            self.store.set(BEGUN, "")
            self.await_receivers("joined", "did not join")
            self.group = self.channel.group(self.root, 0)
        except RolloutError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise RolloutError(f"a receiver of weights is gone: {_first_line(error)}") from None
        self.joined = True

    def await_receivers(self, what: str, complaint: str) -> None:
        """Wait for an answer from each receiver; raise if one reports an error, is called off or is too late."""
        keys = {number: f"{what}/{number}" for number in range(self.channel.receivers)}
        deadline = time.monotonic() + self.channel.timeout
        while not self._are_there(list(keys.values()), deadline):
            missing = [number for number, key in keys.items() if not self.store.check([key])]
            if missing and self.store.check([CALLED_OFF]):
                raise RolloutError(f"{_receivers(missing)} of weights {complaint}, and will not")
            if missing and time.monotonic() > deadline:
                raise RolloutError(f"{_receivers(missing)} of weights {complaint} in {self.channel.timeout:g} s")
        for number, key in keys.items():
            answer = self.store.get(key).decode()
            self.store.delete_key(key)
            if answer != OK:
                raise RolloutError(f"receiver {number} of weights {answer}")

    def _are_there(self, keys: list[str], deadline: float) -> bool:
        """Return True once all keys are set, False when it is time to check for a call-off or the deadline."""
        seconds = min(SECONDS_BETWEEN_LOOKS, max(0.001, deadline - time.monotonic()))
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistError:
            return False
        return True


class _Parcel:
    """One version in transit: two buckets that alternate between being filled and being read."""

    def __init__(self, sender: Sender, version: int) -> None:
        self.sender = sender
        self.version = version
        channel = sender.channel
        device = channel.bucket_device(sender.device)
        self.idle = deque(Bucket(channel.bucket_bytes, device) for _ in range(2))
        self.under_way: deque[tuple[int, Bucket | None, Any]] = deque()  # number, bucket, broadcast to wait for
        self.number = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current bucket, after sending that one off if it is full."""
        if not self.idle[0].has_room(tensor):
            self._ship()
        self.idle[0].add(name, tensor)

    def _ship(self) -> None:
        """Send the current bucket; if both are in transit then, wait for the older one."""
        bucket = self.idle.popleft()
        header = Header(bucket.entries, bucket.used)
        if self.sender.group is None:
            # The receiver reads the same memory, so the copies into the bucket must be complete.
            torch.cuda.current_stream(bucket.buffer.device).synchronize()
            self._announce(replace(header, mapping=describe(bucket.buffer)), bucket, None)
        else:
            self._announce(header, bucket, bucket.buffer[: bucket.used])
        if not self.idle:
            self._retire()

    def _announce(self, header: Header, bucket: Bucket | None, data: Tensor | None) -> None:
        """Publish a header, and start to broadcast the data that belongs to it, if any."""
        self.sender.store.set(f"{self.version}/{self.number}", header.encode())
        work = None if data is None else self.sender.group.broadcast(data, 0)
        self.under_way.append((self.number, bucket, work))
        self.number += 1

    def _retire(self) -> None:
        """Wait until all receivers have used the oldest bucket in transit, and make it available again."""
        number, bucket, work = self.under_way[0]
        key = f"{self.version}/{number}"
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise RolloutError(f"a receiver of weights is gone: {_first_line(error)}") from None
        self.sender.await_receivers(f"{key}/used", f"did not take bucket {number} of version {self.version}")
        self.sender.store.delete_key(key)
        self.under_way.popleft()
        if bucket is not None:
            bucket.clear()
            self.idle.append(bucket)

    def finish(self, failure: str = "") -> None:
        """Send the last bucket and the end notice; after a `failure` of the iterator of weights, only the notice."""
        try:
            if not failure and self.idle[0].entries:
                self._ship()
            self._announce(Header(end=True, failure=failure), None, None)
            while self.under_way:
                self._retire()
        except RolloutError:
            self.sender.close()
            raise


@dataclass(frozen=True)
class Incoming:
    """The weights of one version as they arrive at one receiver; `LoadingEngine.load` takes it, in any process.

    A tensor is a view of a bucket and valid only until the next one is requested: copy it to keep it longer.
    """

    channel: Channel
    number: int
    version: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        receiver = _join(self.channel, self.number)
        try:
            failure = yield from receiver.receive(self.version)
        except BaseException:
            leave(self.channel, self.number)
            raise
        if failure:  # the channel is intact and may carry another version
            raise RolloutError(f"the sender of weights failed: {failure}")


@dataclass(frozen=True)
class PerWorker:
    """The weights of one version for an engine with several workers: each worker takes its own `Incoming`."""

    arriving: tuple[Incoming, ...]

    def of(self, worker: int) -> Incoming:
        return self.arriving[worker]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for an engine that is its own only worker."""
        return iter(self.of(0))


class _Receiver:
    """The engine's end of a channel, kept between versions."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.buffer: Tensor | None = None
        try:
            root = channel.connect()
            self.store = dist.PrefixStore(channel.key, root)
            self.store.set(f"joined/{number}", OK)
            self._await(BEGUN, channel.patience, "did not begin")
            self.group = channel.group(root, 1 + number)
        except RolloutError:
            raise
        except RuntimeError as error:
            raise self._gone(f"or another receiver did not join in {channel.timeout:g} s", error) from None

    def receive(self, version: int) -> Generator[tuple[str, Tensor], None, str]:
        """Yield the tensors of all buckets; return why they are incomplete, or an empty string."""
        number = 0
        while True:
            key = f"{version}/{number}"
            header = self._header(key, self.channel.timeout if number else self.channel.patience)
            if header.end:
                self.buffer = None
                self.store.set(f"{key}/used/{self.number}", OK)
                return header.failure
            answer = "stopped before the end"
            try:
                yield from self._tensors(header)
                answer = OK
            finally:
                with suppress(dist.DistError):  # a sender that is gone needs no answer
                    self.store.set(f"{key}/used/{self.number}", answer)
            number += 1

    def _header(self, key: str, seconds: float) -> Header:
        return Header.decode(self._await(key, seconds, f"sent no header {key}"))

    def _await(self, key: str, seconds: float, complaint: str) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return self.store.get(key)
        except dist.DistError as error:
            raise self._gone(f"{complaint} in {seconds:g} s", error) from None

    def _tensors(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one bucket, received by broadcast or mapped from the sender's GPU memory."""
        if self.group is None:
            buffer = open_mapping(header.mapping)
        else:
            buffer = self._space(header.used)
            self._finish(self.group.broadcast(buffer, 0))
        yield from unpack(header, buffer)
        if buffer.is_cuda:  # copies out of the buffer must be complete before they are acknowledged
            torch.cuda.current_stream().synchronize()

    def _space(self, size: int) -> Tensor:
        """Return the first `size` bytes of the receive buffer, which is allocated again if it is too small."""
        if self.buffer is None or self.buffer.numel() < size:
            device = torch.device("cuda", torch.cuda.current_device()) if self.channel.transport == "nccl" else None
            self.buffer = torch.empty(max(size, self.channel.bucket_bytes), dtype=torch.uint8, device=device)
        return self.buffer[:size]

    def _finish(self, work: Any) -> None:
        """Wait for a broadcast on the host: otherwise an NCCL call that never ends would block the device silently."""
        deadline = time.monotonic() + self.channel.timeout
        try:
            if self.channel.transport == "gloo":
                work.wait()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RolloutError(f"the sender of weights paused within a bucket for {self.channel.timeout:g} s")
                time.sleep(0.0005)
            work.wait()
        except RolloutError:
            raise
        except RuntimeError as error:
            raise self._gone("stopped in the middle of a bucket", error) from None

    def _gone(self, what: str, error: RuntimeError) -> RolloutError:
        return RolloutError(f"the sender of weights at {self.channel.host} {what}: {_first_line(error)}")

    def is_orphan(self) -> bool:
        """True once the sender's store no longer answers."""
        try:
            self.store.check(["anyone"])
        except dist.DistError:
            return True
        return False

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()


_joined: dict[tuple[str, int], _Receiver] = {}  # this process's, by key of the channel and number of the receiver


def _join(channel: Channel, number: int) -> _Receiver:
    """Return the receiver of a channel. Before a new one joins, receivers whose sender is gone are closed."""
    place = (channel.key, number)
    if place not in _joined:
        for old in [old for old in _joined.values() if old.is_orphan()]:
            leave(old.channel, old.number)
        _joined[place] = _Receiver(channel, number)
    return _joined[place]


def leave(channel: Channel, number: int) -> None:
    """Close and forget the receiver of a channel that failed or is no longer used."""
    receiver = _joined.pop((channel.key, number), None)
    if receiver is not None:
        receiver.close()


def _nccl_group(store: dist.Store, rank: int, size: int) -> Any:
    """Create an NCCL group with a timeout of 24 hours.

    NCCL's own watchdog would end the process; our timeouts raise long before.
    """
    kind: Any = vars(dist)["ProcessGroupNCCL"]  # missing in CPU builds of PyTorch
    options = kind.Options()
    options._timeout = timedelta(hours=24)
    return kind(store, rank, size, options)


def _own_address(host: str) -> str:
    """Return the address of this machine on its route to the sender's."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses a route; a datagram socket sends nothing yet
        return str(probe.getsockname()[0])


def _receivers(numbers: list[int]) -> str:
    return f"receiver{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
