"""Reserve the devices of a run on a Ray cluster and assign them to its processes.

`connect` joins or starts Ray (`driver`), chooses nodes for the plan (`placement.pack`), reserves the devices and yields
a `Cluster`, from which `starter` gets a slot for each process.

Ray only reserves devices and starts processes. One placement group holds all devices of a run, so that it starts as a
whole or not at all, and each process gets its devices through its environment.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from openrlhf.cluster import probes
from openrlhf.cluster.driver import joined
from openrlhf.cluster.head import Head
from openrlhf.cluster.placement import Node, PlacementPlan, explain_shortage, place
from openrlhf.config.worker_groups import GroupPlan
from openrlhf.errors import RESUME, BackendError, ConfigError, counted
from openrlhf.monitor import say

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

Answer = TypeVar("Answer")
SECONDS_TO_RESERVE = 60.0
SECONDS_TO_ANSWER = 300.0  # wait for a probe; a node may first have to start Python on a slow disk


@dataclass(frozen=True)
class Device:
    """One reserved device: a bundle of the placement group. Bundles are numbered in the order of the plan."""

    bundle: int
    node: Node
    visible: str | None  # the device's name in CUDA_VISIBLE_DEVICES; None for a CPU


@dataclass(frozen=True)
class ProcessSlot:
    """Place of one process on the cluster; start it with `Actor.options(**slot.options).remote(...)`."""

    options: Mapping[str, object]  # Ray options, including the environment of the process
    address: str  # address of its node
    node: str  # id of its node


@dataclass(frozen=True)
class Cluster:
    """The reserved devices of a run, by group and engine. Created by `connect`."""

    plan: PlacementPlan
    head: Head
    reserved: PlacementGroup
    devices: Mapping[str, Sequence[Device]]  # by rank, for each group and for each engine with its own devices
    unit: str  # GPU or CPU
    nodes: Sequence[Node]  # all nodes that were alive at the start, including those without devices of this run

    def group_slots(self, group: GroupPlan) -> list[ProcessSlot]:
        """Return the slots of a group by rank.

        Their environment holds the rendezvous address of the group's processes; each call finds a new port.
        """
        devices, per_node = self.devices[group.name], group.devices_per_node
        # If all processes are on one node, use its loopback address, which other machines cannot reach.
        one_node = len({device.node.id for device in devices}) == 1
        address = "127.0.0.1" if one_node else devices[0].node.address
        (port,) = await_answers([run_on_node(probes.find_free_port, self.reserved, devices[0].bundle, address)])
        shared = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(per_node),
        }
        slots: list[ProcessSlot] = []
        for rank, device in enumerate(devices):
            local_rank = 0 if device.visible is not None else rank % per_node  # its only visible GPU
            slots.append(self._slot((device,), shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}))
        return slots

    def engine_slots(self, number: int) -> list[ProcessSlot]:
        """Return the slots of an engine: a process for each of its nodes, which sees the engine's devices there."""
        engine = self.plan.engines[number]
        first = engine.place * engine.devices if engine.shares else 0
        devices = self.devices[engine.shares or engine.name][first : first + engine.devices]
        size = engine.devices_per_node
        if engine.nodes == 1:
            return [self._slot(devices, {})]
        # vLLM would otherwise guess the address at which the engine's other nodes reach a node.
        parts = [devices[start : start + size] for start in range(0, len(devices), size)]
        return [self._slot(part, {"VLLM_HOST_IP": part[0].node.address}) for part in parts]

    def find_port(self, slots: Sequence[ProcessSlot]) -> int:
        """Return a free port on the node of the first of these processes; raise if one of their nodes is lost.

        It waits for Ray: call it in a thread.
        """
        import ray

        slot, alive = slots[0], {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        lost = sorted({one.address for one in slots if one.node not in alive})
        if lost:
            message = f"an engine cannot start on its {len(slots)} nodes: Ray has lost {', '.join(lost)}"
            raise BackendError(message, try_this=RESUME)
        bundle = next(device.bundle for device in chain(*self.devices.values()) if device.node.id == slot.node)
        (port,) = await_answers([run_on_node(probes.find_free_port, self.reserved, bundle, slot.address)])
        return port

    def node_slot(self, node: Node) -> ProcessSlot:
        """Return the slot of a process without devices, on any node; the process takes no devices from runs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return ProcessSlot(process_options(strategy, {"OMP_NUM_THREADS": "1"}), node.address, node.id)

    def _slot(self, devices: Sequence[Device], environment: Mapping[str, str]) -> ProcessSlot:
        """Return the slot of a process on these devices of one node.

        The process requests no resources from Ray: the placement group holds the devices, so processes that share
        them need no fractional GPUs, and Ray leaves CUDA_VISIBLE_DEVICES unchanged if a process requests no GPU.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = devices[0].node
        processes = sum(device.node.id == node.id for device in chain(*self.devices.values()))  # all share its cores
        values = {"OMP_NUM_THREADS": str(max(1, node.cores // processes)), **environment}
        if self.unit == "GPU":
            values["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible or "" for device in devices)
        strategy = PlacementGroupSchedulingStrategy(
            self.reserved, devices[0].bundle, placement_group_capture_child_tasks=False
        )
        return ProcessSlot(process_options(strategy, values), node.address, node.id)


def process_options(strategy: object, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the Ray options of a process that requests no resources."""
    # If the package runs from a checkout, workers import it from there, before anything on the inherited path.
    package = Path(__file__).parents[2]
    checkout = "" if package.name in ("site-packages", "dist-packages") else str(package)
    values = {
        "PYTHONPATH": os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH")))),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # hides warnings of PyTorch
        **environment,
    }
    return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy, "runtime_env": {"env_vars": values}}


@contextmanager
def connect(plan: PlacementPlan, folders: Mapping[str, str]) -> Iterator[Cluster]:
    """Join a running cluster or start a private one, and reserve the devices of the plan while the context is open.

    `folders` maps flags to folders that all nodes of the plan must share.

    Call it in the main thread: the processes of a private Ray end with the thread that started them.
    """
    import ray
    from ray._private.state import available_resources_per_node

    with joined(plan) as private:
        # Count the devices of the nodes that are alive: GPUs, or CPUs if the whole cluster has no GPU.
        alive, free = [node for node in ray.nodes() if node["Alive"]], available_resources_per_node()
        unit = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
        nodes: list[Node] = []
        for node in alive:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            cores = (os.cpu_count() or 1) if private else int(total.get("CPU", 1))
            devices, unused = int(total.get(unit, 0)), int(left.get(unit, 0))
            nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], devices, unused, cores))

        # Choose nodes for the plan, and reserve their devices.
        placed = place(plan, nodes)
        if placed is None:
            raise explain_shortage(plan, nodes, unit, private=private)
        if unit == "CPU" and not private:
            say("the cluster has no GPU: each device of this run is one CPU")
        spread, chosen = placed
        engine = next(iter(spread.engines), None)
        if engine is not None and engine.nodes > 1:
            each = counted(engine.devices_per_node, "device")
            slow = "; tensor parallelism over nodes is slow" if engine.stage_devices > engine.devices_per_node else ""
            say(
                f"each engine spans {engine.nodes} nodes, with {each} on each: its sockets are open to everyone on "
                f"their network, which should be private (docs/cluster.md){slow}"
            )
        with reserve(spread, chosen, nodes, unit) as cluster:
            check_shared_folders(cluster, folders)
            yield cluster


@contextmanager
def reserve(plan: PlacementPlan, chosen: Sequence[str], nodes: Sequence[Node], unit: str) -> Iterator[Cluster]:
    """Reserve one bundle per device, each on the node chosen for its block, while the context is open."""
    import ray
    from ray.util import placement_group, remove_placement_group

    head = Head(ray.get_runtime_context().gcs_address)
    blocks, by_id = plan.blocks(), {node.id: node for node in nodes}
    places = [(block.owner, name) for block, name in zip(blocks, chosen, strict=True) for _ in range(block.devices)]
    reserved = placement_group(
        [{unit: 1}] * len(places),
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": name} for _, name in places],
    )
    try:
        if not reserved.wait(SECONDS_TO_RESERVE):
            raise BackendError(
                f"Ray did not reserve {counted(len(places), unit)} for the run ({plan.describe()}) within "
                f"{SECONDS_TO_RESERVE:.0f} seconds, although enough were free: another job may have taken them",
                try_this="ray status to see what holds them, then the same command again",
            )
        visible: Sequence[str | None] = [None] * len(places)
        if unit == "GPU":  # only a process inside a bundle can see which GPU it has
            asked = [run_on_node(probes.own_device, reserved, bundle, num_gpus=1) for bundle in range(len(places))]
            visible = await_answers(asked)
        devices: dict[str, list[Device]] = {}
        for bundle, (owner, name) in enumerate(places):
            devices.setdefault(owner, []).append(Device(bundle, by_id[name], visible[bundle]))
        # Ray assigns devices to bundles in any order; on each node, order the ranks by device number or UUID.
        # Comparing lengths first sorts 10 after 9.
        for found in devices.values():
            order = list(dict.fromkeys(device.node.id for device in found))
            found.sort(key=lambda one: (order.index(one.node.id), len(one.visible or ""), one.visible or ""))
        yield Cluster(plan, head, reserved, devices, unit, nodes)
    finally:
        if not head.lost:
            remove_placement_group(reserved)


def run_on_node(
    probe: Callable[..., Answer], reserved: PlacementGroup, bundle: int, *arguments: object, num_gpus: int = 0
) -> ObjectRef[Answer]:
    """Run a function of `probes` on the node of a bundle; return a reference to its answer.

    The function is pickled by value, so the node needs no installed `openrlhf` to run it.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(probes)
    strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
    task = ray.remote(probe).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy)
    return task.remote(*arguments)


def await_answers(references: Sequence[ObjectRef[Answer]]) -> list[Answer]:
    """Wait for the answers of functions started with `run_on_node`."""
    import ray

    try:
        return ray.get(list(references), timeout=SECONDS_TO_ANSWER)
    except ray.exceptions.GetTimeoutError:
        raise BackendError(
            f"a node of the Ray cluster did not start a process within {SECONDS_TO_ANSWER:.0f} seconds",
            try_this="ray status to see whether all nodes are healthy, then the same command again",
        ) from None


def check_shared_folders(cluster: Cluster, folders: Mapping[str, str]) -> None:
    """Check that all nodes share the folders of checkpoints and results: each must see a file written here."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    others = {device.node.id: device for device in chain(*cluster.devices.values()) if device.node.id != here}
    if not others:
        return
    files: dict[str, Path] = {}
    for flag, folder in folders.items():
        path = Path(folder).absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
        files[flag] = existing / f".openrlhf-{secrets.token_hex(8)}"
    try:
        for file in files.values():
            file.touch()
        for device in others.values():
            asked = run_on_node(probes.unseen, cluster.reserved, device.bundle, list(files.values()))
            (unseen,) = await_answers([asked])
            for flag in (flag for flag, file in files.items() if file in unseen):
                raise ConfigError(
                    f"{flag} {folders[flag]} is not shared by all nodes: a file written here is missing on "
                    f"{device.node.address}, but the workers of all nodes write one checkpoint",
                    try_this=f"{flag} on a file system that all nodes share",
                )
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
