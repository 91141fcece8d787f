"""Process groups for ring attention, where several processes share each packed row.

A ring is the processes that share a row. A lane takes the process at the same position from every ring, so that sums
over a lane count each row once. `share_rows` gives a network its ring; both DeepSpeed classes call it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import distributed as dist

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.models.forward import Network
from openrlhf.models.ring import Ring, check_ring


@dataclass(frozen=True)
class Layout:
    """The arrangement of all processes: tensor-parallel peers have adjacent ranks.

    A ring connects processes with the same tensor-parallel position in adjacent tensor-parallel groups.
    """

    world: int
    ring: int
    tensor: int

    def rings(self) -> Iterator[list[int]]:
        """Yield the ranks of each ring, in ring order."""
        for first in range(0, self.world, self.ring * self.tensor):
            for peer in range(first, first + self.tensor):
                yield [peer + place * self.tensor for place in range(self.ring)]

    def lanes(self) -> Iterator[list[int]]:
        """Yield the ranks of each lane, by data-parallel rank: one of each ring, at the same ring and peer position."""
        for start in range(self.ring * self.tensor):
            yield list(range(start, self.world, self.ring * self.tensor))


@dataclass(frozen=True)
class RingGroups:
    """The ring of this process, and its lane, over which each row is counted once."""

    ring: dist.ProcessGroup
    lane: dist.ProcessGroup


@cache
def make_groups(layout: Layout) -> RingGroups:
    """Create all groups, in the same order in every process; cached, because a process's models share them."""
    return RingGroups(_own(layout.rings()), _own(layout.lanes()))


def _own(members: Iterator[list[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in members]  # new_group returns a number for groups this process is not in
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


def share_rows(network: Network, sharding: ShardingFlags) -> RingGroups | None:
    """Give a network its ring if --ring_attn_size is above 1; return the groups."""
    size, tensor = sharding.ring_attn_size, sharding.ds_tensor_parallel_size
    if size == 1:
        return None
    check_ring(network.decoder.config, sharding)
    groups = make_groups(Layout(dist.get_world_size(), size, tensor))
    network.ring = Ring(groups.ring, dist.get_rank(groups.ring), size, sharding.ring_head_stride)
    return groups
