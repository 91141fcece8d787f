"""Which processes of a launch share packed rows: rings of neighbours, and across them those with equal places."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import distributed as dist

from openrlhf.config.sections.training import Sharding
from openrlhf.models.forward import Network
from openrlhf.models.ring import Ring, check_ring


@dataclass(frozen=True)
class Layout:
    """A world of processes: tensor-parallel peers are neighbours, rings are of neighbours among equal peers."""

    world: int
    ring: int
    tensor: int

    def rings(self) -> Iterator[list[int]]:
        """Processes that share rows, in the order of the ring."""
        for first in range(0, self.world, self.ring * self.tensor):
            for peer in range(first, first + self.tensor):
                yield [peer + place * self.tensor for place in range(self.ring)]

    def lanes(self) -> Iterator[list[int]]:
        """Processes of different rows: one of each ring with the same place and peer, by data-parallel rank."""
        for start in range(self.ring * self.tensor):
            yield list(range(start, self.world, self.ring * self.tensor))


@dataclass(frozen=True)
class RingGroups:
    """The ring of this process, and the lane over which rows are counted once each."""

    ring: dist.ProcessGroup
    lane: dist.ProcessGroup


@cache
def make_groups(layout: Layout) -> RingGroups:
    """Every process makes all groups in the same order; made once, because the models of a process share them."""
    return RingGroups(_own(layout.rings()), _own(layout.lanes()))


def _own(members: Iterator[list[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in members]  # of those that it is not in, a process gets a number
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


def share_rows(network: Network, sharding: Sharding) -> RingGroups | None:
    """Gives a network its ring, where rows are to be shared."""
    size, tensor = sharding.ring_attn_size, sharding.ds_tensor_parallel_size
    if size == 1:
        return None
    check_ring(network.decoder.config, sharding)
    groups = make_groups(Layout(dist.get_world_size(), size, tensor))
    network.ring = Ring(groups.ring, dist.get_rank(groups.ring), size, sharding.ring_head_stride)
    return groups
