"""Reward functions and agents on all nodes of a cluster: two real Ray nodes on this machine."""

import asyncio
import os
import signal
import textwrap
from contextlib import asynccontextmanager

import pytest

from openrlhf.agents.build import build_executor, reward_spec
from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.scores import Samples, Scored
from openrlhf.cluster.placement import plan
from openrlhf.cluster.pool_nodes import PoolNode, share_processes
from openrlhf.cluster.session import connect
from openrlhf.cluster.starter import open_starter
from openrlhf.config.commands import RLConfig
from openrlhf.config.parser import parse
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.errors import ConfigError, RewardError
from openrlhf.types import Prompt
from tests.agents.sessions import Scripted, decode, params, prompt
from tests.cluster.ray_runs import ON_RAY, pid_of, two_nodes
from tests.commands import as_argv
from tests.tiny import make_tokenizer

WATCHDOG = 300.0  # seconds
# Each call notes its process and returns it as the reward, once there is a file `go`.
SOURCE = """
    import os, time
    def reward_func(queries, prompts, labels):
        {check}
        with open({folder!r} + "/seen", "a") as out:
            out.write(f"{{os.getpid()}} ")
        while not os.path.exists({folder!r} + "/go"):
            time.sleep(0.01)
        return [float(os.getpid())] * len(queries)
"""


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(cpus=2):
        yield


@pytest.fixture
def write(tmp_path):
    def make(check="pass"):
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(SOURCE).format(check=check, folder=str(tmp_path)))
        return str(path)

    return make


@asynccontextmanager
async def opened(file, flag="remote_rm_url"):
    """Yield the executor of a run on the cluster, and the pool of the other node; each node has one process."""
    paths = {"pretrain": "./model", "prompt_data": "./data.jsonl", flag: file}
    config = parse(RLConfig, as_argv(ON_RAY | paths | {"reward_processes": 2, "reward_timeout": WATCHDOG}))
    tokenizer = make_tokenizer()
    executor = build_executor(config.rewards, tokenizer, context_length=config.rollout.context_length)
    try:
        with connect(plan(config), {}) as cluster:
            async with open_starter(cluster) as starter:
                yield executor, await starter.start_pools(config, tokenizer)
    finally:
        await executor.close()


def group(number, *answers):
    prompts = (Prompt(number, f"{number}=", (1, 2), "x"),) * len(answers)
    return Samples(prompts, tuple(f"{number}={answer}" for answer in answers), answers)


async def wait_for_calls(folder, count):
    """Wait until this many calls have started, in any process; return the processes."""
    seen = folder / "seen"
    while not seen.exists() or len(seen.read_text().split()) < count:
        await asyncio.sleep(0.01)
    return set(seen.read_text().split())


@pytest.mark.slow(seconds=8)
@pytest.mark.usefixtures("cluster")
def test_calls_run_on_all_nodes_and_survive_the_loss_of_one(write, tmp_path, capsys):
    async def play():
        async with opened(write("assert queries != ['odd'], 'odd'")) as (executor, pools):
            await executor.add_pools(pools)
            (other,) = pools
            with pytest.raises(CallFailure, match=r"raised AssertionError: odd at .*reward\.py:4") as failure:
                await other.call(RewardInput(["odd"], ["p"], ["x"], seed=0), retries=0)
            assert "Traceback" in failure.value.traceback

            # One call on each node, at the same time: each of the two processes takes one.
            calls = [asyncio.ensure_future(executor.rewards.score(group(number, "a", "b"))) for number in range(2)]
            before = await wait_for_calls(tmp_path, 2)
            assert len(before) == 2
            os.kill(await pid_of(other.process), signal.SIGKILL)
            (tmp_path / "go").touch()
            scores = await asyncio.wait_for(asyncio.gather(*calls), WATCHDOG)
            return before, scores, list(executor.rewards.pool.running) == [executor.rewards.pool.local]

    before, scores, is_dropped = asyncio.run(play())
    assert is_dropped
    assert all(isinstance(score, Scored) for group in scores for score in group)
    pids = {str(int(score.reward)) for group in scores for score in group}
    assert len(pids & before) == 1  # both groups were scored on the driver's node, perhaps by a second process
    printed = capsys.readouterr().err
    assert "reward.py runs on 2 nodes" in printed
    assert "died: it crashed or was killed" in printed
    assert "its calls start again on the other nodes" in printed


@pytest.mark.slow(seconds=6)
@pytest.mark.usefixtures("cluster")
def test_a_node_on_which_the_reward_fails_is_not_used(write, tmp_path, monkeypatch, capsys):
    """The nodes of the cluster started before the variable was set."""
    monkeypatch.setenv("ONLY_ON_THE_DRIVER", "1")
    (tmp_path / "go").touch()

    async def play():
        async with opened(write("os.environ['ONLY_ON_THE_DRIVER']")) as (executor, pools):
            await executor.rewards.score(group(0, "a"))  # as in the test with made-up answers
            await executor.add_pools(pools)
            pool = executor.rewards.pool
            return len(pools), type(pool), pool.limits.processes

    assert asyncio.run(play()) == (1, Pool, 2)
    assert "it raised KeyError: 'ONLY_ON_THE_DRIVER'" in capsys.readouterr().err


# Each turn notes its process, and waits for a file `go`. The first turn "x" ends its process.
AGENT = """
    import asyncio, os, pathlib
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    FOLDER = pathlib.Path({folder!r})

    class Agent(AgentInstanceBase):
        async def __init__(self, *args, **kwargs):
            self.turns = 0

        async def step(self, states, **kwargs):
            self.turns += 1
            with open(FOLDER / "seen", "a") as out:
                out.write(f"{{os.getpid()}} ")
            if states["action_text"] == "x" and not (FOLDER / "crashed").exists():
                (FOLDER / "crashed").touch()
                os._exit(3)
            assert states["action_text"] != "odd", "odd"
            while not (FOLDER / "go").exists():
                await asyncio.sleep(0.01)
            return {{"rewards": 1.0, "environment_feedback": ";", "done": self.turns == 2,
                    "sampling_params": states["sampling_params"], "extra_logs": {{"pid": os.getpid()}}}}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(Agent)
"""


@pytest.mark.slow(seconds=10)
@pytest.mark.usefixtures("cluster")
def test_episodes_run_on_all_nodes_and_survive_the_loss_of_one(tmp_path, capsys):
    """The engine answers each request once, even if a process crashes or a node is lost."""
    file, go = tmp_path / "agent.py", tmp_path / "go"
    file.write_text(textwrap.dedent(AGENT).format(folder=str(tmp_path)))

    async def play():
        async with opened(file, "agent_func_path") as (executor, pools):

            async def run_group(*texts):
                sessions = [Scripted(*own) for own in texts]
                result = await executor.run_group(prompt(), params(len(sessions)), sessions)
                assert [len(session.requests) for session in sessions] == [2] * len(sessions)
                assert [session.closed for session in sessions] == [1] * len(sessions)
                assert [decode(item.input_ids) for item in result.trajectories] == [
                    f"1+1={first};{second}" for first, second in texts
                ]
                return [int(item.extra_logs["pid"]) for item in result.trajectories]

            go.touch()
            (here,) = await run_group(("a", "b"))
            await executor.add_pools(pools)
            (other,) = pools
            local, remote = await run_group(("a", "b"), ("x", "c"))  # "x" crashes on the other node, once
            assert (local, remote != here) == (here, True)
            with pytest.raises(RewardError, match=r"agent\.py raised AssertionError: odd at .*, for sample 1 of"):
                await run_group(("a", "b"), ("odd", "c"))

            go.unlink()
            (tmp_path / "seen").unlink()
            group = asyncio.ensure_future(run_group(("a", "b"), ("d", "e")))
            assert len(await wait_for_calls(tmp_path, 2)) == 2  # both episodes have had their first answer
            os.kill(await pid_of(other.process), signal.SIGKILL)
            go.touch()
            return here, await asyncio.wait_for(group, WATCHDOG)

    here, pids = asyncio.run(play())
    assert pids == [here, here]
    printed = capsys.readouterr().err
    assert "agent.py runs on 2 nodes" in printed
    assert "its calls start again on the other nodes" in printed


def test_a_file_that_differs_is_rejected(write):
    flags = RewardFlags(remote_rm_url=write())
    with pytest.raises(ConfigError, match=r"reward\.py is missing here or differs from the file on the driver's node"):
        asyncio.run(PoolNode().start(reward_spec(flags), flags, "0" * 64, "."))


@pytest.mark.parametrize(
    ("total", "nodes", "shares"),
    [(8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (1, 1, [1]), (None, 2, [None, None])],
)
def test_processes_are_divided_among_nodes(total, nodes, shares):
    assert share_processes(total, nodes) == shares
