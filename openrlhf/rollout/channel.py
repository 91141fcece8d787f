"""Weights from a trainer's process to the processes of engines, in large buckets; both sides enter together.

Headers and acknowledgements go through a small store that the sender serves. The bytes go by a broadcast (gloo, nccl)
in a group of our own, because vLLM and DeepSpeed each own the default one, or (ipc) stay where they are on the GPU that
both sides use. A receiver acknowledges a bucket once its tensors are used, so that two buckets take turns: one is
filled while the other is read. Everything that waits does so for a limited time and says who did not come.
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
BEGUN = "begun"  # the sender is there: until then receivers are patient, from then on both sides are prompt
SECONDS_TO_CALL = 3.0
SECONDS_BETWEEN_LOOKS = 1.0  # for whether a sender is still wanted
OK = "ok"  # a receiver's consent; any other answer says what went wrong


@dataclass(frozen=True)
class Channel:
    """Where to meet, and how the bytes travel. Port and key are known once a `Sender` serves it."""

    host: str  # an address of the sender's machine that the receivers reach
    transport: Transport
    receivers: int  # processes, numbered from 0
    bucket_bytes: int = 1 << 28
    timeout: float = 120.0  # seconds
    patience: float = 24 * 3600.0  # for a version to begin: a trainer may have a step to finish before it sends
    port: int = 0
    key: str = ""  # so that a channel formed anew never meets the keys of an older one

    def connect(self, *, serve: bool = False) -> dist.Store:
        return dist.TCPStore(
            self.host, self.port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=self.timeout)
        )

    def group(self, store: dist.Store, rank: int) -> Any:
        """A process group that only this channel knows; None where the bytes are not sent."""
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
        """Tells the sender, from any process, that a receiver will not come; a sender that is gone needs no telling."""
        with suppress(OSError, dist.DistError):
            socket.create_connection((self.host, self.port), SECONDS_TO_CALL).close()  # torch is loud where nobody is
            dist.PrefixStore(self.key, replace(self, timeout=SECONDS_TO_CALL).connect()).set(CALLED_OFF, "")

    def bucket_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.transport == "gloo" else device


class Sender:
    """The trainer's end. A send that failed leaves the channel unusable: make another one."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        if channel.transport == "ipc":
            if channel.receivers != 1:
                raise BackendError("an ipc channel has one receiver: make one channel for each GPU")
            check_allocator()
        store: Any = channel.connect(serve=True)
        self.channel = replace(channel, port=store.port, key=uuid.uuid4().hex)
        self.root: Any = store  # serves for as long as it is held
        self.store: Any = dist.PrefixStore(self.channel.key, store)
        self.device = device
        self.group: Any = None
        self.joined = False
        self.closed = False

    def send(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """All weights to all receivers; with `verify` the checksums of what was sent, else nothing."""
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
        except RolloutError:  # of a receiver: nothing more can be agreed upon with the others
            self.close()
            raise
        except BaseException as error:
            parcel.finish(f"{type(error).__name__}: {error}")
            raise
        parcel.finish()
        return sums

    def close(self) -> None:
        self.closed = True
        if self.group is not None:
            self.group.abort()
        self.group = None
        self.root = self.store = None

    def _meet(self) -> None:
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
        """Waits for an answer of each receiver."""
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
        """Waits for them, for so long as nothing else need be looked at."""
        seconds = min(SECONDS_BETWEEN_LOOKS, max(0.001, deadline - time.monotonic()))
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistError:
            return False
        return True


class _Parcel:
    """One version on its way: two buckets that take turns."""

    def __init__(self, sender: Sender, version: int) -> None:
        self.sender = sender
        self.version = version
        channel = sender.channel
        device = channel.bucket_device(sender.device)
        self.idle = deque(Bucket(channel.bucket_bytes, device) for _ in range(2))
        self.under_way: deque[tuple[int, Bucket | None, Any]] = deque()  # number, bucket, what to wait for
        self.number = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if not self.idle[0].has_room(tensor):
            self._ship()
        self.idle[0].add(name, tensor)

    def _ship(self) -> None:
        bucket = self.idle.popleft()
        header = Header(bucket.entries, bucket.used)
        if self.sender.group is None:
            torch.cuda.current_stream(bucket.buffer.device).synchronize()
            self._announce(replace(header, mapping=describe(bucket.buffer)), bucket, None)
        else:
            self._announce(header, bucket, bucket.buffer[: bucket.used])
        if not self.idle:
            self._retire()

    def _announce(self, header: Header, bucket: Bucket | None, data: Tensor | None) -> None:
        self.sender.store.set(f"{self.version}/{self.number}", header.encode())
        work = None if data is None else self.sender.group.broadcast(data, 0)
        self.under_way.append((self.number, bucket, work))
        self.number += 1

    def _retire(self) -> None:
        """Waits until the oldest bucket under way was used by everyone."""
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
        """The last bucket, then that nothing follows. After a failure of the iterator the channel stays usable."""
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
    """The weights of one version as they arrive at one receiver: what `Engine.load` iterates over, in any process.

    A tensor is a view of a bucket that holds until the next one is asked for; who keeps it longer copies it.
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
        if failure:  # the channel is sound, and may bring another version
            raise RolloutError(f"the sender of weights failed: {failure}")


@dataclass(frozen=True)
class PerWorker:
    """The weights of one version for an engine of several workers: each takes what comes for it."""

    arriving: tuple[Incoming, ...]

    def of(self, worker: int) -> Incoming:
        return self.arriving[worker]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """For an engine that is its own only worker."""
        return iter(self.of(0))


class _Receiver:
    """An engine process's end, kept between versions."""

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
        """The tensors of all buckets; returns why they are not complete, or nothing."""
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
        if self.group is None:
            buffer = open_mapping(header.mapping)
        else:
            buffer = self._space(header.used)
            self._finish(self.group.broadcast(buffer, 0))
        yield from unpack(header, buffer)
        if buffer.is_cuda:  # copies out of the buffer must be over before the sender hears that they are
            torch.cuda.current_stream().synchronize()

    def _space(self, size: int) -> Tensor:
        if self.buffer is None or self.buffer.numel() < size:
            device = torch.device("cuda", torch.cuda.current_device()) if self.channel.transport == "nccl" else None
            self.buffer = torch.empty(max(size, self.channel.bucket_bytes), dtype=torch.uint8, device=device)
        return self.buffer[:size]

    def _finish(self, work: Any) -> None:
        """Waits on the host: an nccl that never ends would else stop the device without a word."""
        deadline = time.monotonic() + self.channel.timeout
        try:
            if self.channel.transport == "gloo":
                work.wait()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RolloutError(f"the sender of weights stopped amid a bucket for {self.channel.timeout:g} s")
                time.sleep(0.0005)
            work.wait()
        except RolloutError:
            raise
        except RuntimeError as error:
            raise self._gone("stopped amid a bucket", error) from None

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


_joined: dict[tuple[str, int], _Receiver] = {}  # of this process


def _join(channel: Channel, number: int) -> _Receiver:
    place = (channel.key, number)
    if place not in _joined:
        for old in [old for old in _joined.values() if old.is_orphan()]:
            leave(old.channel, old.number)
        _joined[place] = _Receiver(channel, number)
    return _joined[place]


def leave(channel: Channel, number: int) -> None:
    """Forgets a channel that is no longer used, or failed."""
    receiver = _joined.pop((channel.key, number), None)
    if receiver is not None:
        receiver.close()


def _nccl_group(store: dist.Store, rank: int, size: int) -> Any:
    """Its own watchdog would end the process; ours raise long before."""
    kind: Any = vars(dist)["ProcessGroupNCCL"]  # absent from builds for the CPU
    options = kind.Options()
    options._timeout = timedelta(hours=24)
    return kind(store, rank, size, options)


def _own_address(host: str) -> str:
    """The address of this machine on the way to the sender's."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _receivers(numbers: list[int]) -> str:
    return f"receiver{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
