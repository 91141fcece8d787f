"""The nodes and GPUs of a run on Ray, for its memory plan."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain

from openrlhf.cluster.session import Cluster
from openrlhf.plan.gpus import GIB, GPUS, Machine

GPU_TYPE = "accelerator_type:"  # prefix of the resource that names the GPUs of a node
LARGEST = {"H100": 93.1 * GIB, "GH200": 140.0 * GIB}  # bytes of the largest variant: Ray's name does not say which


def machine_of(cluster: Cluster) -> Machine | None:
    """Return the machine; None if it has no GPUs, or Ray does not know them.

    The driver may be on another machine, and opening a CUDA context would take memory of a GPU that the run uses, so
    only Ray is asked. Host memory is known if the run is on the driver's node alone.
    """
    import ray

    if cluster.unit == "CPU":
        return None
    nodes = {device.node.id: device.node for device in chain(*cluster.devices.values())}
    found = [node["Resources"] for node in ray.nodes() if node["NodeID"] in nodes]
    names = {name.removeprefix(GPU_TYPE) for resources in found for name in resources if name.startswith(GPU_TYPE)}
    gpus = [GPUS.get("A100-80" if name == "A100" else name.removesuffix("G")) for name in names]  # Ray: A100-80G
    known = [replace(gpu, memory=LARGEST.get(gpu.name, gpu.memory)) for gpu in gpus if gpu is not None]
    if not known or len(known) < len(gpus):
        return None
    is_here = set(nodes) == {ray.get_runtime_context().get_node_id()}
    host = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if is_here else None
    per_node = min(node.devices for node in nodes.values())
    return Machine(min(known, key=lambda gpu: gpu.memory), per_node, len(nodes), host)
