"""Which rank of the policy sends to which engine. The ranks are stand-ins; Ray is not needed."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from openrlhf.cluster.actors import ModelWorker
from openrlhf.cluster.weight_sync import PolicyRanks
from openrlhf.rollout.engine_group import unguarded


class Rank:
    """Stand-in for a rank of the policy, which opens channels on a port with its number."""

    def __init__(self, number, address):
        self.number = number
        self.address = address

    async def call(self, method, channel):
        assert method is ModelWorker.open_channel
        return replace(channel, port=self.number)


def receivers(transport, ranks, engines, workers_per_engine=1, per_gpu=1):
    """Return the port, which is the sending rank, and the number of each receiver."""
    group = SimpleNamespace(
        processes=[Rank(number, "10.0.0.1") for number in range(ranks)], watch=SimpleNamespace(guard=unguarded)
    )
    policy = PolicyRanks(group, transport, workers_per_engine, per_gpu)
    found = asyncio.run(policy.open_channels(["10.0.0.1"] * engines))
    assert {receiver.channel.host for receiver in found} == {"127.0.0.1"}
    return [(receiver.channel.port, receiver.number, receiver.channel.receivers) for receiver in found]


def test_the_first_rank_sends_to_engines_on_other_devices():
    assert receivers("nccl", ranks=2, engines=3) == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_rank_sends_to_the_engine_worker_on_its_gpu(workers):
    found = receivers("ipc", ranks=4, engines=4 // workers, workers_per_engine=workers)
    assert found == [(rank, 0, 1) for rank in range(4)]


def test_each_rank_sends_to_all_engines_on_its_gpu():
    found = receivers("ipc", ranks=2, engines=4, per_gpu=2)
    assert found == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
