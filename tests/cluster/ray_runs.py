"""RL runs on a Ray cluster of two nodes on this machine, small enough for two cores.

`ON_RAY` holds the flags, `two_nodes` the cluster, `KillOnCall` kills a worker at a chosen call, and the other functions
read what a run recorded.
"""

import os
import shlex
import signal
import tempfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from openrlhf.cluster.calls import Process
from openrlhf.cluster.driver import interpreter_for_ray
from tests.rl.toy_task import SMALL, read_rollouts
from tests.warm import warm_python

ON_RAY = SMALL | {  # as few processes as possible; each test adds the ones it needs
    "runtime": "ray",
    "actor_num_gpus_per_node": 1,
    "ref_num_gpus_per_node": 1,
    "critic_num_gpus_per_node": 1,
    "reward_num_gpus_per_node": 1,
    "vllm_num_engines": 0,
    "reward_processes": 1,
    "enforce_eager": True,
    "micro_train_batch_size": 8,
    "micro_rollout_batch_size": 8,
}
AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        done = self.turns == 2
        reward = torch.tensor(sum(letter.islower() for letter in states["action_text"]) / 8)
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else " again:",
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@contextmanager
def two_nodes(cpus):
    """Make this process the driver of a Ray cluster of two nodes with this many CPUs each; its workers start warm."""
    options = {"num_cpus": cpus, "num_gpus": 0, "include_dashboard": False}
    with interpreter_for_ray(Path(tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"]))):
        cluster = Cluster(initialize_head=True, head_node_args=options)
        cluster.add_node(num_cpus=cpus, num_gpus=0)
    try:
        cluster.wait_for_nodes()
        warm = {"py_executable": shlex.join(warm_python())}
        ray.init(address=cluster.address, logging_level="ERROR", runtime_env=warm)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def count_prompts(ran):
    """Count the samples trained for each prompt index, over all recorded steps."""
    return Counter(row["prompt"]["index"] for row in all_samples(ran))


def all_samples(ran):
    steps = len(list((ran.save_path / "run" / "rollouts").glob("step_*.parquet")))
    return [row for step in range(1, steps + 1) for row in read_rollouts(ran, step)]


def max_log_prob_difference(ran):
    """Return the largest difference between the engine's log-probs and the trainer's."""
    pairs = [zip(row["rollout_log_probs"], row["old_log_probs"], strict=True) for row in all_samples(ran)]
    return max(abs(ours - theirs) for pair in pairs for ours, theirs in pair)


class KillOnCall:
    """Kill a process of the run as soon as it works on the chosen call, counted from 1."""

    def __init__(self, monkeypatch, name, method, applied=None, at=1):
        self.name, self.method, self.applied, self.at = name, method, applied, at
        self.seen = 0
        self.call = Process.call
        killer = self

        async def call(process, method, *arguments, **named):
            if killer.is_meant(process, method, arguments):
                killer.seen += 1
                if killer.seen == killer.at:
                    return await killer.kill_during(process, method, arguments, named)
            return await killer.call(process, method, *arguments, **named)

        monkeypatch.setattr(Process, "call", call)

    def is_meant(self, process, method, arguments):
        return process.name == self.name and method is self.method and self.applied in (None, *arguments[:1])

    async def kill_during(self, process, method, arguments, named):
        pid = await pid_of(process)
        reference = getattr(process.actor, method.__name__).remote(*arguments, **named)
        os.kill(pid, signal.SIGKILL)
        return await process.answer(reference)


async def pid_of(process):
    return await process.answer(process.actor.__ray_call__.remote(lambda _: os.getpid()))


def record_pids(monkeypatch, method):
    """Return a dict that fills with the pids of the processes that run this method, by process name."""
    pids = defaultdict(set)
    before = Process.call

    async def call(process, called, *arguments, **named):
        if called is method:
            pids[process.name].add(await pid_of(process))
        return await before(process, called, *arguments, **named)

    monkeypatch.setattr(Process, "call", call)
    return pids
