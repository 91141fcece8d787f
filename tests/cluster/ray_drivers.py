"""Ray drivers for tests, each run as a process: `python ray_drivers.py DRIVER FLAGS` prints its report as JSON.

Tests start them with `Machine.run_driver` (ray_machine.py), so that each has its own Ray, environment and signals.
"""

import json
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace

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


def report_placement(flags):
    """Report the node, ranks and devices that each worker and engine of a run sees."""
    import ray

    @ray.remote
    class Worker:
        def look(self):
            import openrlhf

            here = {name: os.environ[name] for name in SHOWN if name in os.environ}
            return here | {"node": ray.get_runtime_context().get_node_id(), "package": openrlhf.__file__}

    def report(slots):
        workers = [Worker.options(**slot.options).remote() for slot in slots]
        found = ray.get([worker.look.remote() for worker in workers])
        return [one | {"assigned_node": slot.node} for one, slot in zip(found, slots, strict=True)]

    def our_handler(*_):
        """Stand in for the handler that ends a run on SIGTERM."""

    signal.signal(signal.SIGTERM, our_handler)
    with opened(flags) as cluster:
        groups = {group.name: report(cluster.group_slots(group)) for group in cluster.plan.groups}
        engines = report([slot for engine in cluster.plan.engines for slot in cluster.engine_slots(engine.number)])
        kept = signal.getsignal(signal.SIGTERM) is our_handler
        return {"groups": groups, "engines": engines, "unit": cluster.unit, "sigterm_kept": kept}


def find_ports(flags):
    """Report a port for an engine on several nodes, and the error if one of them is lost."""
    with opened(flags) as cluster:
        first, second = cluster.engine_slots(0)
        port = cluster.find_port([first, second])
        try:
            cluster.find_port([first, replace(second, node="0" * 56)])  # Ray does not know this node
        except OpenRLHFError as error:
            return {"port": port, "lost": error.message, "address": second.address}


def two_gpus(flags):
    """Report the placement on a new Ray with two devices that count as GPUs."""
    import ray

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="ERROR")
    return report_placement(flags)


def report_from_other_folder(flags):
    """Report from a driver whose working directory differs from that of the workers."""
    os.chdir("elsewhere")
    return report_placement(flags)


def run_forever(flags):
    """Run until killed, with a worker that computes without ever returning to Ray."""
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
        slots = cluster.group_slots(cluster.plan.groups[0])
        busy = [Worker.options(**slot.options).remote().compute.remote(ready) for slot in slots]
        ray.get(ready.wait.remote())
        write("up")
        ray.get(busy)


def two_nodes(_):
    """Run a cluster of two nodes on this machine until standard input ends."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=3)
    cluster.wait_for_nodes()
    write(cluster.address)
    sys.stdin.read()


def head_and_node(_):
    """Run a cluster of two CPU nodes until standard input ends; print its address and the pids of each node."""
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


DRIVERS = {
    driver.__name__: driver
    for driver in (
        report_placement,
        find_ports,
        two_gpus,
        report_from_other_folder,
        run_forever,
        two_nodes,
        head_and_node,
    )
}

if __name__ == "__main__":
    driver, *flags = sys.argv[1:]
    try:
        write(json.dumps(DRIVERS[driver](flags)))
    except OpenRLHFError as error:
        write(json.dumps({"error": type(error).__name__, "message": str(error)}))
