"""Reserve the devices of a run on a Ray cluster and assign them to its processes.

Ray only reserves devices and starts processes. One placement group holds all devices of a run, so that it starts as a
whole or not at all, and each process gets its devices through its environment. Files with reward functions and agents
need not be copied to other nodes: user code runs in processes beside the controller, on the driver's node.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openrlhf
from openrlhf.cluster import probes
from openrlhf.cluster.driver import joined
from openrlhf.cluster.head import Head
from openrlhf.cluster.placement import Node, Plan, explain_shortage, pack
from openrlhf.errors import BackendError, ConfigError
from openrlhf.monitor import say

SECONDS_TO_RESERVE = 60.0


@dataclass(frozen=True)
class Device:
    """One reserved device: a bundle of the placement group. Bundles are numbered in the order of the plan."""

    bundle: int
    node: Node
    visible: str | None  # the device's name in CUDA_VISIBLE_DEVICES; None for a CPU


@dataclass(frozen=True)
class Seat:
    """Slot of one process on the cluster; start it with `Actor.options(**seat.options).remote(...)`."""

    options: Mapping[str, Any]
    environment: Mapping[str, str]  # included in the options
    address: str  # of its node
    node: str  # id of its node


class Cluster:
    """The reserved devices of a run, by group and engine. Created by `connect`."""

    def __init__(
        self, plan: Plan, head: Head, reserved: Any, devices: Mapping[str, Sequence[Device]], *, unit: str
    ) -> None:
        self.plan = plan
        self.head = head
        self.reserved = reserved  # the placement group
        self.devices = devices  # by rank, for each group and for each engine with its own devices
        self.unit = unit  # GPU or CPU

    def seats(self, group: str) -> tuple[Seat, ...]:
        """Return the slots of a group by rank.

        Their environment holds the rendezvous address of the group's processes; each call finds a new port.
        """
        devices = self.devices[group]
        master = {"MASTER_ADDR": devices[0].node.address, "MASTER_PORT": str(self.free_port(devices[0]))}
        per_node = self.plan.group(group).devices_per_node
        return tuple(
            self.seat(
                (device,),
                {
                    **master,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(devices)),
                    "LOCAL_RANK": "0" if device.visible is not None else str(rank % per_node),
                    "LOCAL_WORLD_SIZE": str(per_node),
                },
            )
            for rank, device in enumerate(devices)
        )

    def engine_seat(self, number: int) -> Seat:
        """Return the slot of an engine: one process that sees all the engine's devices, on their node."""
        engine = self.plan.engines[number]
        if engine.shares is None:
            return self.seat(self.devices[engine.name])
        first = number * engine.devices
        return self.seat(self.devices[engine.shares][first : first + engine.devices])

    def seat(self, devices: Sequence[Device], environment: Mapping[str, str] | None = None) -> Seat:
        """Return the slot of a process on these devices of one node.

        The process requests no resources from Ray: the placement group holds the devices, so processes that share
        them need no fractions, and Ray does not change CUDA_VISIBLE_DEVICES of a process that requests no GPU.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = devices[0].node
        values = {
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": str(self.threads(node)),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # its warnings do not help users
            **(environment or {}),
        }
        if self.unit == "GPU":
            values["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible or "" for device in devices)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.reserved,
            placement_group_bundle_index=devices[0].bundle,
            placement_group_capture_child_tasks=False,
        )
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": values},
        }
        return Seat(options, values, node.address, node.id)

    def threads(self, node: Node) -> int:
        """Return the number of threads per process, such that the processes of a node share its cores equally."""
        here = sum(device.node.id == node.id for device in self.all_devices())
        return max(1, node.cores // here)

    def free_port(self, device: Device) -> int:
        import ray

        return ray.get(ask(probes.find_free_port, self.reserved, device.bundle).remote())

    def all_devices(self) -> tuple[Device, ...]:
        return tuple(device for devices in self.devices.values() for device in devices)


@contextmanager
def connect(plan: Plan, folders: Mapping[str, str]) -> Iterator[Cluster]:
    """Join a running cluster or start a private one, and reserve the devices of the plan while the context is open.

    `folders` maps flags to folders that all nodes of the plan must share.

    Call it in the main thread: the processes of a private Ray end with the thread that started them.
    """
    with joined(plan) as private:
        nodes, unit = count_nodes(private=private)
        chosen = pack(plan.blocks(), nodes)
        if chosen is None:
            raise explain_shortage(plan, nodes, unit, private=private)
        if unit == "CPU" and not private:
            say("the cluster has no GPU: each device of this run is one CPU")
        with reserve(plan, chosen, nodes, unit) as cluster:
            check_shared_folders(cluster, folders)
            yield cluster


def count_nodes(*, private: bool) -> tuple[list[Node], str]:
    """Return the nodes that are alive and the unit of their devices: GPU, or CPU if the whole cluster has no GPU."""
    import ray
    from ray._private.state import available_resources_per_node

    alive = [node for node in ray.nodes() if node["Alive"]]
    unit = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
    free = available_resources_per_node()
    counted = []
    for node in alive:
        total, left = node["Resources"], free.get(node["NodeID"], {})
        cores = (os.cpu_count() or 1) if private else int(total.get("CPU", 1))
        devices, room = int(total.get(unit, 0)), int(left.get(unit, 0))
        counted.append(Node(node["NodeID"], node["NodeManagerAddress"], devices, room, cores))
    return counted, unit


@contextmanager
def reserve(plan: Plan, chosen: Sequence[str], nodes: Sequence[Node], unit: str) -> Iterator[Cluster]:
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
                f"Ray did not give the run its {len(places)} {unit}s ({plan.describe()}) within "
                f"{SECONDS_TO_RESERVE:.0f} seconds, though they were free: another job may have taken them",
                try_this="ray status, and then again",
            )
        visible = visible_devices(reserved, len(places)) if unit == "GPU" else [None] * len(places)
        devices: dict[str, list[Device]] = {}
        for bundle, (owner, name) in enumerate(places):
            devices.setdefault(owner, []).append(Device(bundle, by_id[name], visible[bundle]))
        yield Cluster(plan, head, reserved, {owner: by_number(found) for owner, found in devices.items()}, unit=unit)
    finally:
        if not head.lost:
            remove_placement_group(reserved)


def by_number(devices: Sequence[Device]) -> list[Device]:
    """Sort a group's devices: nodes in their given order, and devices of a node by number."""
    order = list(dict.fromkeys(device.node.id for device in devices))
    return sorted(devices, key=lambda device: (order.index(device.node.id), natural(device.visible)))


def natural(visible: str | None) -> tuple[int, str]:
    """Return the sort key of a device name: numbers by value, UUIDs alphabetically."""
    return (int(visible), "") if visible is not None and visible.isdecimal() else (0, visible or "")


def visible_devices(reserved: Any, count: int) -> list[str]:
    """Return the GPU of each bundle; only a process inside the bundle can tell."""
    import ray

    asked = [ask(probes.own_device, reserved, bundle, num_gpus=1) for bundle in range(count)]
    return ray.get([task.remote() for task in asked])


def ask(question: Callable[..., Any], reserved: Any, bundle: int, *, num_gpus: int = 0) -> Any:
    """Return a function of `probes` as a Ray task on the node of a bundle.

    It is pickled by value, so that the node needs no `openrlhf` for it.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(probes)
    strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
    return ray.remote(question).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy)


def check_shared_folders(cluster: Cluster, folders: Mapping[str, str]) -> None:
    """Check that every node sees the folders of checkpoints and results, by looking there for a file written here."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    others = {device.node.id: device for device in cluster.all_devices() if device.node.id != here}
    if not others:
        return
    token = f".openrlhf-{secrets.token_hex(8)}"
    files = {flag: nearest_folder(Path(folder)) / token for flag, folder in folders.items()}
    try:
        for file in files.values():
            file.touch()
        for device in others.values():
            unseen = ray.get(ask(probes.unseen, cluster.reserved, device.bundle).remote(list(files.values())))
            for flag in (flag for flag, file in files.items() if file in unseen):
                raise ConfigError(
                    f"{flag} {folders[flag]} is not one folder for all nodes: {device.node.address} does not see what "
                    "this node writes there, and workers of all nodes write one checkpoint",
                    try_this=f"{flag} on a file system that the nodes share",
                )
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    found = folder.absolute()
    while not found.is_dir():
        found = found.parent
    return found


def python_path() -> str:
    """Return the PYTHONPATH of workers: the checkout, if the package runs from one, before the inherited value."""
    here = Path(openrlhf.__file__).parents[1]
    checkout = [] if here.name in ("site-packages", "dist-packages") else [str(here)]
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*checkout, given] if given else checkout)
