"""Process groups for ring attention.

A ring is a group of processes that share each packed row. A lane consists of the processes at the same position of all
rings, so that sums over a lane count each row once. DeepSpeed and FSDP classes call `share_rows` to set the ring of a
network. Tensor-parallel peers have adjacent ranks; a ring connects processes at the same position among their peers.
For example, eight processes with --ring_attn_size 2 and --ds_tensor_parallel_size 2:

    ranks   0 1 2 3 | 4 5 6 7      tensor-parallel peers: (0 1) (2 3) (4 5) (6 7)
    rings   (0 2) (1 3) | (4 6) (5 7)
    lanes   (0 4) (1 5) (2 6) (3 7)
"""

from functools import cache

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.forward import Network
from openrlhf.models.ring import Ring, check_ring


@cache
def ring_mesh(device_type: str, ring: int, tensor: int) -> DeviceMesh:
    """Return all processes as a mesh [lane, ring, tensor-parallel peers]; all models of a process share its groups."""
    shape = (dist.get_world_size() // (ring * tensor), ring, tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("lane", "ring", "tensor"))


def share_rows(network: Network, sharding: ShardingFlags, device_type: str) -> dist.ProcessGroup | None:
    """Set the ring of a network if --ring_attn_size is above 1, and return the lane of this process."""
    size = sharding.ring_attn_size
    if size == 1:
        return None
    check_ring(network.decoder.config, sharding)
    mesh = ring_mesh(device_type, size, sharding.ds_tensor_parallel_size)
    group = mesh["ring"].get_group()
    network.ring = Ring(group, dist.get_rank(group), size, sharding.ring_head_stride)
    return mesh["lane"].get_group()
