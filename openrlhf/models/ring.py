"""A ring: processes that share every packed row, each holding some of its tokens.

The row is cut into two chunks for each process, and process i takes the chunks i and 2N - 1 - i: a late token has more
to look back at than an early one, and so each process gets as much of either. Whatever a network makes of its tokens is
then put together again on every process, so that losses need not know about rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from openrlhf.config.sections.training import Sharding
from openrlhf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RINGABLE_LAYERS = {"full_attention", "sliding_attention"}
ROPE_OF_THE_LENGTH = {"dynamic", "longrope"}  # their angles depend on the longest position, which is elsewhere


@dataclass(frozen=True)
class Ring:
    """This process's place in its ring; `head_stride` key heads travel at a time."""

    group: dist.ProcessGroup
    index: int
    size: int
    head_stride: int = 1

    def pass_on(self, tensor: Tensor) -> Arriving:
        """Sends a tensor to the next process while the previous one's, of equal shape, comes in."""
        coming = torch.empty_like(tensor)
        members = dist.get_process_group_ranks(self.group)
        following, preceding = members[(self.index + 1) % self.size], members[self.index - 1]
        calls = [
            dist.P2POp(dist.isend, tensor, following, self.group),
            dist.P2POp(dist.irecv, coming, preceding, self.group),
        ]
        return Arriving(coming, tensor, dist.batch_isend_irecv(calls))


@dataclass(frozen=True)
class Arriving:
    """A tensor on its way, and the one sent meanwhile, which must stay until it has left."""

    tensor: Tensor
    leaving: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


@dataclass(frozen=True)
class Block:
    """Queries of one process that see keys of another: pairs of sequences, bounded alike on both sides.

    Where the keys are the queries' own tokens, each sees those up to itself. Where they come from an earlier part of
    one long sequence, each sees all of them; `distance` is then from the first key to the first query.
    """

    queries: slice
    keys: slice
    query_bounds: tuple[int, ...]  # within `queries`
    key_bounds: tuple[int, ...]
    distance: int

    @property
    def causal(self) -> bool:
        return self.distance == 0


@dataclass(frozen=True)
class Share:
    """What one process of a ring holds of a packed row whose sequences begin and end at `bounds`."""

    ring: Ring
    bounds: tuple[int, ...]  # the last sequence fills the row up, so that all chunks are equally long

    @classmethod
    def of(cls, bounds: Sequence[int], ring: Ring) -> Share:
        chunk = -(-bounds[-1] // (2 * ring.size))
        filled = 2 * ring.size * chunk
        return cls(ring, (*bounds, filled) if filled > bounds[-1] else tuple(bounds))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.bounds[-1] // (2 * self.ring.size)

    def starts(self, index: int) -> tuple[int, int]:
        """Where the two chunks of a process begin in the row."""
        return index * self.chunk, (2 * self.ring.size - 1 - index) * self.chunk

    def cut(self, row: Tensor) -> Tensor:
        """This process's tokens of a filled row."""
        return torch.cat([row[start : start + self.chunk] for start in self.starts(self.ring.index)])

    def held(self, places: Tensor) -> Tensor:
        """Numbers of those among `places` in the row whose tokens are here."""
        chunks = places // self.chunk
        owners = torch.minimum(chunks, 2 * self.ring.size - 1 - chunks)
        return (owners == self.ring.index).nonzero().squeeze(-1)

    def local(self, places: Tensor) -> Tensor:
        """Where tokens that are here lie among this process's."""
        early, late = self.starts(self.ring.index)
        return torch.where(places < early + self.chunk, places - early, places - late + self.chunk)

    def join(self, values: Tensor, numbers: Tensor, count: int) -> Tensor:
        """[count, ...] on every process, of which it brings those with these numbers."""
        return Joined.apply(values, numbers, count, self.ring.group)

    def blocks(self, source: int, window: int | None = None) -> Iterator[Block]:
        """What this process's queries see of the keys of process `source`."""
        if source == self.ring.index:
            bounds = self._own_bounds()
            yield Block(slice(0, 2 * self.chunk), slice(0, 2 * self.chunk), bounds, bounds, 0)
        for query_place, query_start in enumerate(self.starts(self.ring.index)):
            for key_place, key_start in enumerate(self.starts(source)):
                if key_start < query_start:
                    yield from self._earlier(query_place, query_start, key_place, key_start, window)

    def _own_bounds(self) -> tuple[int, ...]:
        """Of sequences, or of what is here of them, within this process's tokens: a chunk's end is a bound too."""
        found = {0, self.chunk, 2 * self.chunk}
        for place, start in enumerate(self.starts(self.ring.index)):
            inside = (bound - start for bound in self.bounds if start < bound < start + self.chunk)
            found |= {place * self.chunk + bound for bound in inside}
        return tuple(sorted(found))

    def _earlier(
        self, query_place: int, query_start: int, key_place: int, key_start: int, window: int | None
    ) -> Iterator[Block]:
        """A rectangle: the one sequence that goes from an earlier chunk into a later one; within a window, its corner.

        Then no query is in it that sees none of its keys.
        """
        key_end = key_start + self.chunk
        begin, end = next((a, b) for a, b in pairwise(self.bounds) if a <= query_start < b)
        first_key, last_query = max(key_start, begin), min(query_start + self.chunk, end)
        if window is not None:
            first_key, last_query = max(first_key, query_start - window + 1), min(last_query, key_end - 1 + window)
        queries, keys = last_query - query_start, key_end - first_key
        if queries <= 0 or keys <= 0:
            return
        from_query = query_place * self.chunk
        from_key = key_place * self.chunk + first_key - key_start
        yield Block(
            slice(from_query, from_query + queries),
            slice(from_key, from_key + keys),
            (0, queries),
            (0, keys),
            query_start - first_key,
        )


class Joined(torch.autograd.Function):
    """Rows that processes hold, as all rows on each. Each makes the same loss of them, so its gradient is whole."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, values: Tensor, numbers: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(numbers)
        joined = values.new_zeros(count, *values.shape[1:])
        joined[numbers] = values
        dist.all_reduce(joined, group=group)  # each row comes from one process, and zeros from the others
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (numbers,) = ctx.saved_tensors
        return gradient[numbers], None, None, None


def check_ring(config: PretrainedConfig, sharding: Sharding) -> None:
    """Refuses a model whose layers cannot work on parts of a sequence, and heads that do not go round evenly."""
    text: Any = config.get_text_config()
    values = text.to_dict()
    heads = (values.get("num_key_value_heads") or text.num_attention_heads) // sharding.ds_tensor_parallel_size
    if heads % sharding.ring_head_stride:
        raise ConfigError(
            f"--ring_head_stride {sharding.ring_head_stride} does not divide the model's {heads} key heads on a device",
            try_this=f"--ring_head_stride {heads}",
        )
    others = set(values.get("layer_types") or ()) - RINGABLE_LAYERS
    if others:
        raise ConfigError(
            f"--ring_attn_size cannot split a sequence for layers of {', '.join(sorted(others))}",
            try_this="--ring_attn_size 1 --ds_tensor_parallel_size 2",
        )
    if values.get("attn_logit_softcapping"):
        raise ConfigError("--ring_attn_size: this model caps its attention scores, which a ring does not do")
    angles = ROPE_OF_THE_LENGTH & set(rope_types(values.get("rope_parameters") or {}))
    if angles:
        raise ConfigError(
            f"--ring_attn_size: {angles.pop()} rotary positions depend on the whole sequence's length, of which a "
            "process sees a part",
            try_this="--ring_attn_size 1 --ds_tensor_parallel_size 2",
        )


def rope_types(parameters: dict[str, Any]) -> Iterator[str]:
    """How positions are rotated; some models have a way for each type of layer."""
    if "rope_type" in parameters:
        yield parameters["rope_type"]
    for value in parameters.values():
        if isinstance(value, dict):
            yield from rope_types(value)
