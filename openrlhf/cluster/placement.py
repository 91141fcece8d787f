"""Placement of a run on a cluster: its worker groups and engines, and the nodes that they fit on.

`plan` derives groups (`config/worker_groups.py`) and engines from the flags, and `pack` assigns their devices to nodes;
`session` then reserves them. Models that share devices share processes, so a colocated run has one process per device
for all its models. This module does not use Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from openrlhf.config.commands import RLConfig
from openrlhf.config.worker_groups import COLOCATED, GroupPlan, plan_groups
from openrlhf.errors import ConfigError, counted


@dataclass(frozen=True)
class EnginePlan:
    """One engine, on its own devices or on those of a group; consecutive engines may share their devices."""

    number: int
    devices: int  # over all its nodes
    shares: str | None  # name of the group whose devices it shares; None if it has its own
    per_gpu: int = 1  # engines that share the same devices
    nodes: int = 1  # number of nodes that it spans, with the same number of devices on each
    stages: int = 1  # pipeline stages, one after the other

    @property
    def stage_devices(self) -> int:
        """Devices of a pipeline stage: the tensor-parallel size."""
        return self.devices // self.stages

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    @property
    def place(self) -> int:
        """Index of its device block; in a shared group, the block is ranks [place * devices, (place + 1) * devices)."""
        return self.number // self.per_gpu

    @property
    def name(self) -> str:
        """Name of its devices, if it has its own."""
        return f"engine-{self.place}"


@dataclass(frozen=True)
class DeviceBlock:
    """Devices that must be on one node. Blocks of the same owner must be on different nodes."""

    owner: str  # name of a group or an engine
    devices: int


@dataclass(frozen=True)
class PlacementPlan:
    """All worker groups and engines of a run."""

    groups: tuple[GroupPlan, ...]
    engines: tuple[EnginePlan, ...]

    def blocks(self) -> tuple[DeviceBlock, ...]:
        """Return the blocks of all devices in bundle order: groups by rank, then engines with their own devices."""
        groups = (DeviceBlock(group.name, group.devices_per_node) for group in self.groups for _ in range(group.nodes))
        own = {engine.name: engine for engine in self.engines if engine.shares is None}  # sharing engines: once
        engines = (
            DeviceBlock(name, engine.devices_per_node) for name, engine in own.items() for _ in range(engine.nodes)
        )
        return (*groups, *engines)

    def spreads(self, largest: int) -> Iterator[PlacementPlan]:
        """Yield this plan with each engine on one node, then on as few more as possible.

        Tensor-parallel devices exchange data in every layer, pipeline stages only between them: a node holds whole
        stages. Only a stage that exceeds all devices of the `largest` node is divided, evenly over nodes. Engines that
        share a group's devices are on the group's nodes.
        """
        yield self
        own = [engine for engine in self.engines if engine.shares is None]
        if own:
            size, width = own[0].devices, own[0].stage_devices
            for nodes in range(2, size + 1):
                per_node = size // nodes
                divided = width > largest and width % per_node == 0
                if size % nodes == 0 and (per_node % width == 0 or divided):
                    yield replace(self, engines=tuple(replace(engine, nodes=nodes) for engine in self.engines))

    @property
    def devices(self) -> int:
        return sum(block.devices for block in self.blocks())

    def describe(self) -> str:
        """Return the plan as text for messages, such as `policy 1 x 8, engines 2 x 4`."""
        parts = [f"{group.name} {group.nodes} x {group.devices_per_node}" for group in self.groups]
        own = [engine for engine in self.engines if engine.shares is None]
        if own and own[0].stages > 1:
            parts.append(f"engines {len(own)} x {own[0].stages} stages x {own[0].stage_devices}")
        elif own:
            each = f" with {own[0].per_gpu} engines each" if own[0].per_gpu > 1 else ""
            parts.append(f"engines {own[-1].place + 1} x {own[0].devices}{each}")
        return ", ".join(parts)


def plan(config: RLConfig) -> PlacementPlan:
    """Plan the groups and engines of a run.

    vLLM engines share the models' devices in a colocated run and have their own devices otherwise. An asynchronous run
    trains and generates at the same time, so its engines always have their own devices. Without vLLM, each policy
    process has a Transformers engine on its device.
    """
    groups = plan_groups(config)
    policy = next(group for group in groups if "actor" in group.roles)
    if not (count := config.engines.vllm_num_engines):
        return PlacementPlan(groups, tuple(EnginePlan(rank, 1, policy.name) for rank in range(policy.size)))
    hybrid = config.placement.colocate_all_models and not config.asynchrony.async_train
    flags, shares = config.engines, policy.name if hybrid else None
    size, per_gpu = flags.devices_per_engine, flags.vllm_engines_per_gpu or 1
    nodes = max(1, size // policy.devices_per_node) if hybrid else 1
    engine = EnginePlan(0, size, shares, per_gpu, nodes, flags.vllm_pipeline_parallel_size)
    return PlacementPlan(groups, tuple(replace(engine, number=number) for number in range(count * per_gpu)))


@dataclass(frozen=True)
class Node:
    """A machine in the cluster. Its devices are GPUs, or CPU cores if the cluster has no GPU."""

    id: str  # Ray's node id
    address: str
    devices: int
    free: int  # devices that no other job holds
    cores: int


def place(plan: PlacementPlan, nodes: Sequence[Node]) -> tuple[PlacementPlan, tuple[str, ...]] | None:
    """Return the plan and a node id for each of its blocks, or None if it cannot be placed.

    An engine is on one node if there is room, because its devices then share that node's NVLink.
    """
    for spread in plan.spreads(max((node.devices for node in nodes), default=0)):
        chosen = pack(spread.blocks(), nodes)
        if chosen is not None:
            return spread, chosen
    return None


def pack(blocks: Sequence[DeviceBlock], nodes: Sequence[Node]) -> tuple[str, ...] | None:
    """Return a node id for each block, or None if the blocks cannot all be placed.

    This is a backtracking search. Large blocks are placed first, each on the node with the fewest free devices that
    suffice, to keep other nodes empty. Nodes with the same number of free devices are interchangeable, so states that
    differ only by exchanging such nodes are tried once.
    """
    order = sorted(range(len(blocks)), key=lambda index: -blocks[index].devices)
    failed: set[tuple[int, tuple[tuple[int, bool], ...]]] = set()

    def place(step: int, free: Mapping[str, int], taken: frozenset[str]) -> dict[int, str] | None:
        """Place the blocks from `step` on; `taken` are the nodes that already hold blocks of the same owner."""
        if step == len(order):
            return {}
        block = blocks[order[step]]
        if step and blocks[order[step - 1]].owner != block.owner:
            taken = frozenset()
        state = (step, tuple(sorted((left, name in taken) for name, left in free.items())))
        if state in failed:
            return None
        for name, left in sorted(free.items(), key=lambda item: item[1]):
            if left >= block.devices and name not in taken:
                rest = place(step + 1, {**free, name: left - block.devices}, taken | {name})
                if rest is not None:
                    return {order[step]: name, **rest}
        failed.add(state)
        return None

    if sum(block.devices for block in blocks) > sum(node.free for node in nodes):
        return None
    chosen = place(0, {node.id: node.free for node in nodes}, frozenset())
    return None if chosen is None else tuple(chosen[index] for index in range(len(blocks)))


def explain_shortage(asked: PlacementPlan, nodes: Sequence[Node], unit: str, *, private: bool) -> ConfigError:
    """Return the error for a plan that does not fit: required devices, free devices and flags to change."""
    free, total = sum(node.free for node in nodes), sum(node.devices for node in nodes)
    there = ", ".join(f"{node.address} has {node.free} of {node.devices} free" for node in nodes) or "no node is alive"
    message = f"the run asks for {counted(asked.devices, unit)} ({asked.describe()}), but {there}"
    widest = max((group.nodes for group in asked.groups), default=1)
    if widest > len(nodes):
        message += f"; expected {counted(widest, 'node')}, got {len(nodes)}"
    elif free >= asked.devices:
        message += (
            "; an engine needs all devices of a pipeline stage on one node, or equal parts on several if no node has "
            "so many, and a group needs all devices that it uses per node"
        )
    if widest > len(nodes) and private:
        return ConfigError(
            message, try_this="ray start on every node first (docs/cluster.md), or smaller --*_num_nodes"
        )
    smaller = "a smaller --vllm_num_engines"
    if asked.groups:
        smaller = "smaller --*_num_nodes, --*_num_gpus_per_node and --vllm_num_engines"
    if total >= asked.devices > free:
        return ConfigError(message, try_this=f"ray status to see which jobs hold the others, or {smaller}")
    if asked.groups and asked.groups[0].name != COLOCATED:  # suggest colocation if it would fit
        blocks = asked.blocks()
        of_policy = [block for block in blocks if block.owner == asked.groups[0].name]
        if len(of_policy) < len(blocks) and pack(of_policy, nodes) is not None:
            return ConfigError(message, try_this=f"--colocate_all_models, or {smaller}")
    return ConfigError(message, try_this=smaller)
