"""The processes of a run as a grid: groups for data, ring, tensor and expert parallelism.

A grid divides the processes into groups along each of its dimensions. The first one, `data`, connects processes at the
same place of all other dimensions; adjacent ranks differ in the last one. For example, eight processes with
--ring_attn_size 2 and --ds_tensor_parallel_size 2:

    ranks     0 1 2 3 | 4 5 6 7
    tensor    (0 1) (2 3) (4 5) (6 7)        peers that divide matrices
    ring      (0 2) (1 3) | (4 6) (5 7)      processes that share each packed row
    data      (0 4) (1 5) (2 6) (3 7)        sums over these count each row once

DeepSpeed and FSDP classes call `share_rows` to set the ring of a network.
"""

import math
from functools import cache

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.forward import Network
from openrlhf.models.ring import Ring, check_ring


@cache
def process_grid(device_type: str, **sizes: int) -> DeviceMesh:
    """Return all processes as a grid, given the sizes of its other dimensions; all models of a process share groups."""
    shape = (dist.get_world_size() // math.prod(sizes.values()), *sizes.values())
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", *sizes))


@cache
def ring_of_all() -> dist.ProcessGroup:
    """Return a group of all processes for a ring.

    A grid would return the default group, whose collectives would wait for the ring's transfers.
    """
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup), "an int only outside the group"
    return group


def share_rows(network: Network, sharding: ShardingFlags, device_type: str) -> dist.ProcessGroup | None:
    """Set the ring of a network if --ring_attn_size is above 1, and return the group of data-parallel ranks."""
    size = sharding.ring_attn_size
    if size == 1:
        return None
    check_ring(network.decoder.config, sharding)
    grid = process_grid(device_type, ring=size, tensor=sharding.ds_tensor_parallel_size)
    group = grid["ring"].get_group() if size < dist.get_world_size() else ring_of_all()
    network.ring = Ring(group, dist.get_rank(group), size, sharding.ring_head_stride)
    return grid["data"].get_group()
