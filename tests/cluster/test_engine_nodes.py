"""An engine on several nodes ends when one of its peers has, without Ray."""

import asyncio
from dataclasses import dataclass, field

import pytest

from openrlhf.cluster import engine_nodes
from openrlhf.cluster.calls import Process
from openrlhf.cluster.engine_nodes import end_with_peers
from openrlhf.errors import DeathError
from openrlhf.rollout.engine_worker import EngineWorker


@dataclass(frozen=True)
class Engine(Process[EngineWorker]):
    """An engine that answers, is stuck or is dead, and records whether it was killed."""

    state: str = "alive"
    killed: list[str] = field(default_factory=list)

    async def call(self, method, *arguments, **named):
        if self.state == "stuck":
            await asyncio.Event().wait()
        if self.state == "dead":
            raise DeathError("engine 0 died")

    def within(self, seconds, timeout_flag=None):
        return self

    def kill(self):
        self.killed.append(self.name)


@pytest.mark.parametrize("state", ["alive", "stuck", "dead"])
def test_an_engine_ends_with_its_peer_whether_or_not_it_answers(state, monkeypatch, capsys):
    monkeypatch.setattr(engine_nodes, "SECONDS_TO_ANSWER", 0.05)
    engine = Engine(None, "engine 0", "here", state=state)

    async def scenario():
        ended = asyncio.get_running_loop().create_future()
        ended.set_exception(DeathError("engine 0, node 1 died"))
        await asyncio.wait_for(end_with_peers(engine, [ended]), 5)
        ended.exception()

    asyncio.run(scenario())
    assert engine.killed == ["engine 0"]
    assert ("lost one of its processes: engine 0, node 1 died" in capsys.readouterr().err) == (state != "dead")
