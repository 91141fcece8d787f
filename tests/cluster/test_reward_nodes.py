"""Reward functions on all nodes of a cluster: two real Ray nodes on this machine."""

import asyncio
import os
import signal
import textwrap
from contextlib import asynccontextmanager

import pytest

from openrlhf.agents.build import build_executor
from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.sandbox.messages import RewardInput
from openrlhf.agents.scores import Samples, Scored
from openrlhf.cluster.placement import plan
from openrlhf.cluster.reward_nodes import RewardNode, share_processes
from openrlhf.cluster.session import connect
from openrlhf.cluster.starter import open_starter
from openrlhf.config.commands import RLConfig
from openrlhf.config.parser import parse
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.errors import ConfigError
from openrlhf.types import Prompt
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
async def opened(file, **flags):
    """Yield the executor of a run on the cluster, and the pool of the other node; each node has one process."""
    paths = {"pretrain": "./model", "prompt_data": "./data.jsonl", "remote_rm_url": file}
    config = parse(RLConfig, as_argv(ON_RAY | paths | {"reward_processes": 2, "reward_timeout": WATCHDOG} | flags))
    executor = build_executor(config.rewards, make_tokenizer(), context_length=64)
    try:
        with connect(plan(config), {}) as cluster:
            async with open_starter(cluster) as starter:
                yield executor, await starter.start_reward_pools(config)
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
            return before, scores, list(executor.rewards.pools.running) == [executor.rewards.pools.local]

    before, scores, is_dropped = asyncio.run(play())
    assert is_dropped
    assert all(isinstance(score, Scored) for group in scores for score in group)
    pids = {str(int(score.reward)) for group in scores for score in group}
    assert pids < before  # both groups were scored by the process on the driver's node
    printed = capsys.readouterr().err
    assert "reward.py runs on 2 nodes" in printed
    assert "died: it crashed or was killed" in printed
    assert "its reward calls start again on the other nodes" in printed


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
            pool = executor.rewards.pools
            return len(pools), list(pool.running) == [pool.local], pool.local.limits.processes

    assert asyncio.run(play()) == (1, True, 2)
    assert "it raised KeyError: 'ONLY_ON_THE_DRIVER'" in capsys.readouterr().err


def test_a_file_that_differs_is_rejected(write):
    flags = RewardFlags(remote_rm_url=write())
    with pytest.raises(ConfigError, match=r"reward\.py is missing here or differs from the file on the driver's node"):
        asyncio.run(RewardNode().start(flags, "0" * 64, "."))


@pytest.mark.parametrize(
    ("total", "nodes", "shares"),
    [(8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (1, 1, [1]), (None, 2, [None, None])],
)
def test_processes_are_divided_among_nodes(total, nodes, shares):
    assert share_processes(total, nodes) == shares
