"""Counts what a cluster has, reserves the devices of a run and says where each process sits.

Ray only reserves and starts processes: one placement group holds all devices of a run, so that it starts as a whole
or not at all, and each process is told its devices in its environment. Files with rewards and agents need not travel:
user code runs in processes beside the controller, on the node of the driver.
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
from openrlhf.errors import BackendError, ConfigError
from openrlhf.launch.ray import probes
from openrlhf.launch.ray.driver import joined
from openrlhf.launch.ray.head import Head
from openrlhf.launch.ray.placement import Node, Plan, explain_shortage, pack
from openrlhf.monitor import say

SECONDS_TO_RESERVE = 60.0


@dataclass(frozen=True)
class Device:
    """One reserved device: a bundle of the placement group, numbered in the order of the plan."""

    bundle: int
    node: Node
    visible: str | None  # the device as CUDA_VISIBLE_DEVICES names it; none on a CPU


@dataclass(frozen=True)
class Seat:
    """Where one process sits: `Actor.options(**seat.options).remote(...)`."""

    options: Mapping[str, Any]
    environment: Mapping[str, str]  # already part of the options
    address: str  # of its node
    node: str  # id of its node


class Cluster:
    """The reserved devices of a run, by group and engine. Made by `connect`."""

    def __init__(
        self, plan: Plan, head: Head, reserved: Any, devices: Mapping[str, Sequence[Device]], *, unit: str
    ) -> None:
        self.plan = plan
        self.head = head
        self.reserved = reserved  # the placement group
        self.devices = devices  # of each group and of each engine that has its own, by rank
        self.unit = unit  # GPU or CPU

    def seats(self, group: str) -> tuple[Seat, ...]:
        """The seats of a group by rank, with the address at which its processes meet; each call finds a new port."""
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
        """The seat of an engine: it sees all its devices, and its process stands on their node."""
        engine = self.plan.engines[number]
        if engine.shares is None:
            return self.seat(self.devices[engine.name])
        first = number * engine.devices
        return self.seat(self.devices[engine.shares][first : first + engine.devices])

    def seat(self, devices: Sequence[Device], environment: Mapping[str, str] | None = None) -> Seat:
        """Options for a process on these devices of one node.

        It asks Ray for nothing: the placement group holds the devices, so the processes that share them need no
        fractions, and Ray leaves CUDA_VISIBLE_DEVICES of a process that asks for no GPU as we set it.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = devices[0].node
        values = {
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": str(self.threads(node)),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # warnings of C++ help nobody here
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
        """Threads of a process, so that those of one node together use its cores once."""
        here = sum(device.node.id == node.id for device in self.all_devices())
        return max(1, node.cores // here)

    def free_port(self, device: Device) -> int:
        import ray

        return ray.get(ask(probes.find_free_port, self.reserved, device.bundle).remote())

    def all_devices(self) -> tuple[Device, ...]:
        return tuple(device for devices in self.devices.values() for device in devices)


@contextmanager
def connect(plan: Plan, folders: Mapping[str, str]) -> Iterator[Cluster]:
    """Joins the cluster that is there, or starts one of its own, and holds the devices of the plan while it is open.

    All nodes of the plan must see `folders`, which are named by their flags.

    To be called in the main thread: the processes of a Ray of our own end with the thread that started them.
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
    """The living nodes with their devices, and what a device is: a GPU, or a CPU where the whole cluster has no GPU."""
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
    """Holds one bundle per device, each on the node that was chosen for its block."""
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
    """A group's devices with neighbours on a node in the order of their numbers."""
    order = list(dict.fromkeys(device.node.id for device in devices))
    return sorted(devices, key=lambda device: (order.index(device.node.id), natural(device.visible)))


def natural(visible: str | None) -> tuple[int, str]:
    """Order of device names: numbers by value, UUIDs by letters."""
    return (int(visible), "") if visible is not None and visible.isdecimal() else (0, visible or "")


def visible_devices(reserved: Any, count: int) -> list[str]:
    """Which GPU stands behind each bundle: only a process within it can tell."""
    import ray

    asked = [ask(probes.own_device, reserved, bundle, num_gpus=1) for bundle in range(count)]
    return ray.get([task.remote() for task in asked])


def ask(question: Callable[..., Any], reserved: Any, bundle: int, *, num_gpus: int = 0) -> Any:
    """A function of `probes` as a task on the node of a bundle. It travels by value and needs no package there."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(probes)
    strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
    return ray.remote(question).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy)


def check_shared_folders(cluster: Cluster, folders: Mapping[str, str]) -> None:
    """Every node must see the folders of checkpoints and results: a file written here is looked for there."""
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
    """The folder itself, or the nearest one above that exists."""
    found = folder.absolute()
    while not found.is_dir():
        found = found.parent
    return found


def python_path() -> str:
    """Where workers find this package when it runs from a checkout, before what the environment says."""
    here = Path(openrlhf.__file__).parents[1]
    checkout = [] if here.name in ("site-packages", "dist-packages") else [str(here)]
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*checkout, given] if given else checkout)
