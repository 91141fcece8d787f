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
        self.opened = channel and channel.host
        return channel and replace(channel, port=self.number)


def receivers(transport, ranks, engines, workers_per_engine=1, per_gpu=1):
    """Return the port, which is the sending rank, and the number of each receiver.

    `ranks` and `engines` are the addresses of their machines, or how many are on one machine.
    """
    places = ranks if isinstance(ranks, list) else ["10.0.0.1"] * ranks
    machines = engines if isinstance(engines, dict) else {number: ["10.0.0.1"] for number in range(engines)}
    processes = [Rank(number, address) for number, address in enumerate(places)]
    group = SimpleNamespace(processes=processes, watch=SimpleNamespace(guard=unguarded))
    policy = PolicyRanks(group, transport, workers_per_engine, per_gpu)
    found = asyncio.run(policy.open_channels(machines))
    for receiver in found:
        assert receiver.channel.host == processes[receiver.channel.port].opened
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


def test_the_first_rank_of_each_node_sends_to_its_part_of_the_engines():
    ranks = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    engines = {0: ["10.0.0.3"], 1: ["10.0.0.2"], 2: ["10.0.0.4", "10.0.0.5"], 3: ["10.0.0.6"]}
    found = receivers("nccl", ranks, engines, workers_per_engine=2)
    assert found == [(0, 0, 4), (0, 1, 4), (2, 0, 4), (2, 1, 4), (0, 2, 4), (0, 3, 4), (2, 2, 4), (2, 3, 4)]


@pytest.mark.parametrize(("transport", "expected"), [("tcp", (0, 0, 1)), ("ipc", (3, 0, 1))])
def test_weights_can_be_sent_to_a_single_engine(transport, expected):
    assert receivers(transport, 4, {3: ["10.0.0.1"]}) == [expected]


@pytest.mark.parametrize(
    ("machines", "host"),
    [(["10.0.0.1"], "127.0.0.1"), (["10.0.0.2"], "10.0.0.1"), (["10.0.0.1", "10.0.0.2"], "10.0.0.1")],
)
def test_a_channel_is_on_the_loopback_address_if_all_workers_are_on_its_node(machines, host):
    rank = Rank(0, "10.0.0.1")
    group = SimpleNamespace(processes=[rank], watch=SimpleNamespace(guard=unguarded))
    asyncio.run(PolicyRanks(group, "tcp", 2).open_channels({0: machines}))
    assert rank.opened == host
