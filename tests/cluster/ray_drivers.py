"""Drivers for tests of Ray, each its own process: `python ray_drivers.py SCENE FLAGS` writes what it saw as JSON."""

import json
import os
import signal
import sys
from contextlib import contextmanager

from openrlhf.cluster.placement import plan
from openrlhf.cluster.session import connect
from openrlhf.config.commands import RLConfig
from openrlhf.config.parser import parse
from openrlhf.errors import OpenRLHFError

BASE = ["--pretrain", "./model", "--prompt_data", "./data.jsonl", "--remote_rm_url", "./reward.py", "--runtime", "ray"]
SHOWN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_CPP_LOG_LEVEL",
)


def write(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def opened(flags):
    config = parse(RLConfig, [*BASE, *flags])
    folders = {"--ckpt_path": config.checkpoints.ckpt_path, "--save_path": config.checkpoints.save_path}
    with connect(plan(config), folders) as cluster:
        yield cluster


def look_around(flags):
    """Who found itself where, and what is free while the run holds its devices and afterwards."""
    import ray

    @ray.remote
    class Worker:
        def look(self):
            import openrlhf

            here = {name: os.environ[name] for name in SHOWN if name in os.environ}
            return here | {"node": ray.get_runtime_context().get_node_id(), "package": openrlhf.__file__}

    def report(seats):
        workers = [Worker.options(**seat.options).remote() for seat in seats]
        found = ray.get([worker.look.remote() for worker in workers])
        return [one | {"told": seat.node} for one, seat in zip(found, seats, strict=True)]

    def ours(*_):
        """Stands for the way in which a run ends on SIGTERM."""

    signal.signal(signal.SIGTERM, ours)
    with opened(flags) as cluster:
        groups = {group.name: report(cluster.seats(group.name)) for group in cluster.plan.groups}
        engines = report([cluster.engine_seat(engine.number) for engine in cluster.plan.engines])
        kept = signal.getsignal(signal.SIGTERM) is ours
        return {"groups": groups, "engines": engines, "unit": cluster.unit, "sigterm_kept": kept}


def two_gpus(flags):
    """The same on a Ray of its own with two devices that count as GPUs."""
    import ray

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="ERROR")
    return look_around(flags)


def unshared(flags):
    """A run whose driver stands in another folder than the workers."""
    os.chdir("elsewhere")
    return look_around(flags)


def stay(flags):
    """A run that never ends by itself, with a process that computes without looking up."""
    import ray

    @ray.remote
    class Worker:
        def compute(self, ready):
            ray.get(ready.set.remote())
            while True:
                pass

    @ray.remote(num_cpus=0)
    class Ready:
        def __init__(self):
            import asyncio

            self.event = asyncio.Event()

        async def set(self):
            self.event.set()

        async def wait(self):
            await self.event.wait()

    with opened(flags) as cluster:
        ready = Ready.remote()
        busy = [Worker.options(**seat.options).remote().compute.remote(ready) for seat in cluster.seats("policy")]
        ray.get(ready.wait.remote())
        write("up")
        ray.get(busy)


def two_nodes(_):
    """A cluster of two nodes on this machine, until standard input ends."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=3)
    cluster.wait_for_nodes()
    write(cluster.address)
    sys.stdin.read()


def head_and_node(_):
    """A cluster of two nodes with CPUs alone, until standard input ends: its address, and the processes of each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    other = cluster.add_node(num_cpus=2, num_gpus=0)
    cluster.wait_for_nodes()
    nodes = [
        [info.process.pid for infos in node.all_processes.values() for info in infos]
        for node in (cluster.head_node, other)
    ]
    write(json.dumps({"address": cluster.address, "head": nodes[0], "node": nodes[1]}))
    sys.stdin.read()


SCENES = {scene.__name__: scene for scene in (look_around, two_gpus, unshared, stay, two_nodes, head_and_node)}

if __name__ == "__main__":
    scene, *given = sys.argv[1:]
    try:
        write(json.dumps(SCENES[scene](given)))
    except OpenRLHFError as error:
        write(json.dumps({"error": type(error).__name__, "message": str(error)}))
