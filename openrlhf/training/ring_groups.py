"""Process groups for ring attention.

A ring is a group of processes that share each packed row. A lane consists of the processes at the same position of all
rings, so that sums over a lane count each row once. DeepSpeed and FSDP classes call `share_rows` to set the ring of a
network. For example, eight processes with --ring_attn_size 2 and --ds_tensor_parallel_size 2:

    ranks   0 1 2 3 | 4 5 6 7      tensor-parallel peers: (0 1) (2 3) (4 5) (6 7)
    rings   (0 2) (1 3) | (4 6) (5 7)
    lanes   (0 4) (1 5) (2 6) (3 7)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import distributed as dist

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.forward import Network
from openrlhf.models.ring import Ring, check_ring


@dataclass(frozen=True)
class ProcessGrid:
    """The arrangement of all processes. Tensor-parallel peers have adjacent ranks.

    A ring connects processes with the same tensor-parallel position in adjacent tensor-parallel groups.
    """

    world: int  # number of processes
    ring: int  # processes per ring
    tensor: int  # tensor-parallel degree

    def rings(self) -> Iterator[list[int]]:
        """Yield the ranks of each ring, in ring order."""
        for first in range(0, self.world, self.ring * self.tensor):
            for peer in range(first, first + self.tensor):
                yield [peer + place * self.tensor for place in range(self.ring)]

    def lanes(self) -> Iterator[list[int]]:
        """Yield the ranks of each lane, in order of data-parallel rank."""
        for start in range(self.ring * self.tensor):
            yield list(range(start, self.world, self.ring * self.tensor))


@dataclass(frozen=True)
class RingGroups:
    """The ring and the lane of this process."""

    ring: dist.ProcessGroup
    lane: dist.ProcessGroup


@cache
def make_groups(grid: ProcessGrid) -> RingGroups:
    """Create all groups, in the same order in every process; cached, because all models of a process share them."""
    own: list[dist.ProcessGroup] = []
    for members in (grid.rings(), grid.lanes()):
        made = [dist.new_group(ranks) for ranks in members]  # an int for groups without this process
        own.append(next(group for group in made if isinstance(group, dist.ProcessGroup)))
    return RingGroups(*own)


def share_rows(network: Network, sharding: ShardingFlags) -> RingGroups | None:
    """Set the ring of a network if --ring_attn_size is above 1, and return the process groups."""
    size = sharding.ring_attn_size
    if size == 1:
        return None
    check_ring(network.decoder.config, sharding)
    groups = make_groups(ProcessGrid(dist.get_world_size(), size, sharding.ds_tensor_parallel_size))
    network.ring = Ring(groups.ring, dist.get_rank(groups.ring), size, sharding.ring_head_stride)
    return groups
