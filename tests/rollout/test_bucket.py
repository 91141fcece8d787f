"""Buckets and the headers that describe them, without a channel."""

import json

import pytest
import torch

from openrlhf.rollout.bucket import ALIGNMENT, MAX_BUCKET, USUAL_BUCKET, Bucket, Entry, Header, bucket_size, unpack
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.ipc import SharedMemory

SHARED = SharedMemory("GPU-1", ["00ff", 4096, 512, "0a", 8, "", True])
HEADERS = {
    "a bucket whose bytes follow": Header(3, [Entry("a", "float32", [2, 3], 0), Entry("b", "bool", [], 32)], 48),
    "a bucket in shared memory": Header(3, [Entry("a", "uint8", [0], 0)], 16, SHARED),
    "the end": Header(3, end=True),
    "the end after a failure": Header(3, end=True, failure="ValueError: torn"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_survives_its_encoding(name):
    text = HEADERS[name].encode()
    assert isinstance(json.loads(text), dict)
    assert Header.decode(text) == HEADERS[name]


def test_tensors_are_unpacked_as_they_were_added():
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.tensor(True),
        "c": torch.empty(0, 2),
        "d": torch.arange(6).view(2, 3).T,
    }
    bucket = Bucket(torch.empty(256, dtype=torch.uint8))
    for name, tensor in tensors.items():
        assert bucket.add(name, tensor)
    found = dict(unpack(Header(3, bucket.entries, bucket.used), bucket.buffer))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)


def test_a_tensor_larger_than_the_bucket_travels_alone():
    bucket = Bucket(torch.empty(64, dtype=torch.uint8))
    large, small = torch.randn(100), torch.randn(2)
    assert bucket.add("large", large)
    assert not bucket.add("small", small)
    assert torch.equal(dict(unpack(Header(3, bucket.entries, bucket.used), bucket.buffer))["large"], large)
    assert Bucket(bucket.buffer).add("small", small)


@pytest.mark.parametrize(
    ("model", "free", "size"),
    [
        (0, [], 256),
        (3, [], 256),
        (8, [], 512),
        (140, [], 1024),
        (140, [80, 40], 1024),
        (140, [80, 4], 512),
        (140, [0.1], 64),
    ],
)
def test_buckets_are_as_large_as_model_and_memory_allow(model, free, size):
    """The model and the free memory are in GiB, buckets in MiB."""
    assert bucket_size(MAX_BUCKET, model << 30, [int(gib * 2**30) for gib in free]) == size << 20


def test_a_limit_on_buckets_holds():
    assert bucket_size(4096, 140 << 30, [80 << 30]) == 4096


def test_buckets_do_not_grow_over_tcp():
    limits = [Channel("127.0.0.1", transport, 1).largest_bucket for transport in ("tcp", "nccl", "ipc")]
    assert limits == [USUAL_BUCKET, MAX_BUCKET, MAX_BUCKET]
    assert Channel("127.0.0.1", "tcp", 1, bucket_bytes=4096).largest_bucket == 4096
