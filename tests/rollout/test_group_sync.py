"""Which engines a weight sync reaches. Engines and policy are stand-ins in this process; the channels are real."""

import asyncio

import torch

from openrlhf.errors import DeathError
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.engine_group import EngineGroup, EngineReplica
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.group_sync import GroupSync, Receiving
from openrlhf.rollout.sync_proof import SyncProof
from openrlhf.rollout.weight_receiver import WeightReceiver
from openrlhf.rollout.weight_sender import WeightSender
from openrlhf.types import Request, SamplingParams

REQUEST = Request((1,), SamplingParams(max_tokens=1))


class Engine:
    """Stand-in for an engine process that writes down its calls; `failures` are the names of calls that fail."""

    def __init__(self, failures=()):
        self.machines = ("127.0.0.1",)
        self.calls = []
        self.receiver = None  # not that of `IncomingWeights`, which has one per process
        self.failures = set(failures)

    def within(self, _seconds):
        return self

    def kill(self):
        self.calls.append("kill")

    def receive(self, incoming):
        if self.receiver is None or self.receiver.channel != incoming.channel:
            self.receiver = WeightReceiver(incoming.channel, incoming.number)
        return {name: checksum(tensor) for name, tensor in self.receiver.receive(incoming.version)}

    async def call(self, method, *arguments, **_named):
        name = method.__name__
        self.calls.append(name)
        if name in self.failures:
            raise DeathError(f"died in {name}")
        if method is EngineWorker.wake:
            self.calls[-1] = f"wake {arguments[0]}"
        if method is EngineWorker.load:
            ((incoming,), version) = arguments[0].by_worker, arguments[1]
            self.calls[-1] = f"load {version}"
            return await asyncio.to_thread(self.receive, incoming)
        if method is EngineWorker.submit:
            self.submitted = dict.fromkeys(arguments[0], "answer")
        return self.submitted if method is EngineWorker.collect else None


class Policy:
    """Stand-in for the policy, with one weight that is its version; `engine` writes down its calls."""

    sender: WeightSender | None = None

    def __init__(self, engine):
        self.engine = engine

    async def open_channels(self, machines):
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(Channel("127.0.0.1", "tcp", len(machines), timeout=60.0), torch.device("cpu"))
        return [Receiving(self.sender.channel, number) for number in range(len(machines))]

    async def send(self, version, *, verify):
        weights = [("weight", torch.full((8,), float(version)))]
        return await asyncio.to_thread(self.sender.send, weights, version, verify=verify)

    async def rest(self):
        pass

    async def free_cache(self):
        self.engine.calls.append("free_cache")


def make_sync(*processes, spares=(), sleeps=False):
    spare = iter(spares)

    async def start(_number):
        return next(spare)

    pool = [EngineReplica(number, process) for number, process in enumerate(processes)]
    group = EngineGroup(pool, start, max_restarts=2)
    sync = GroupSync(Policy(processes[0]), group, sleeps, True, SyncProof(every=1))
    group.send_weights = sync.resend
    return sync


def run(scenario, sync):
    async def main():
        try:
            await scenario()
        finally:
            sync.policy.sender.close()

    asyncio.run(main())


def test_a_replacement_engine_receives_weights_alone():
    healthy, dies, new = Engine(), Engine({"submit"}), Engine()
    sync = make_sync(dies, healthy, spares=[new])

    async def scenario():
        await sync.sync(1)
        before = list(healthy.calls)
        assert before == ["pause", "load 1", "resume"]
        sync.engines.by_prefix[7] = sync.engines.engines[1]
        assert await sync.engines.generate([REQUEST]) == ["answer"]
        assert new.calls[:3] == ["pause", "load 1", "resume"]
        assert "pause" not in healthy.calls[len(before) :]
        assert sync.engines.by_prefix[7].process is healthy  # its cache is still valid
        await sync.sync(2)
        assert new.calls[-3:] == healthy.calls[-3:] == ["pause", "load 2", "resume"]

    run(scenario, sync)


def test_a_new_engine_that_dies_before_it_has_weights_is_replaced_again():
    healthy, dies, dies_too, new = Engine(), Engine({"submit"}), Engine({"pause", "health"}), Engine()
    sync = make_sync(dies, healthy, spares=[dies_too, new])

    async def scenario():
        await sync.sync(1)
        assert await sync.engines.generate([REQUEST]) == ["answer"]
        assert [engine.ready for engine in sync.engines.engines] == [True, True]
        assert new.calls[:3] == ["pause", "load 1", "resume"]
        assert healthy.calls.count("pause") == 1

    run(scenario, sync)


def test_engines_that_share_devices_with_the_policy_receive_weights_together():
    healthy, dies, new = Engine(), Engine({"submit"}), Engine()
    sync = make_sync(dies, healthy, spares=[new], sleeps=True)

    async def scenario():
        await sync.sync(1)
        assert await sync.engines.generate([REQUEST]) == ["answer"]
        assert [engine.calls.count("load 1") for engine in (healthy, new)] == [2, 1]

    run(scenario, sync)


def test_engines_that_share_devices_wake_up_when_the_cache_of_the_models_is_free():
    engine = Engine()
    sync = make_sync(engine, sleeps=True)
    run(lambda: sync.sync(1), sync)
    assert engine.calls == [
        "pause",
        "sleep",
        *("free_cache", "wake weights"),
        "load 1",
        *("free_cache", "wake cache"),
        "resume",
    ]
