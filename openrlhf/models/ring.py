"""A ring of N processes that share every packed row; each holds a part of its tokens (--ring_attn_size).

The row is cut into 2N chunks, and process i holds chunks i and 2N - 1 - i. Late tokens attend to more keys than early
ones, so this balances the work. For N = 2 and a row of three sequences a, b and c:

    row         a a a a a | b b b b b | b b b c c | c c c . .        . pads the row
    chunk           0     |     1     |     2     |     3
    process         0     |     1     |     1     |     0

    1. `Network` selects this process's tokens (`Share.cut`) and runs the layers on them.
    2. In attention, keys and values are passed around the ring (ring_attention.py). `Share.blocks` determines which
       queries of this process attend to which keys of another: the end of c, in process 0, to its start in process 1.
    3. `Network` gathers the outputs of all processes on each of them (`Share.join`), so losses do not depend on rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import ConfigError, counted
from openrlhf.models.chunks import AutogradContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RINGABLE_LAYERS = {"full_attention", "sliding_attention"}
ROPE_OF_THE_LENGTH = {"dynamic", "longrope"}  # angles depend on the last position, which another process may hold


@dataclass(frozen=True)
class Ring:
    """This process's position in its ring; keys and values are sent for `head_stride` key heads at a time."""

    group: dist.ProcessGroup
    index: int
    size: int
    head_stride: int = 1

    def pass_on(self, tensor: Tensor) -> Exchange:
        """Start sending a tensor to the next process and receiving one of equal shape from the previous process."""
        received = torch.empty_like(tensor)
        members = dist.get_process_group_ranks(self.group)
        following, preceding = members[(self.index + 1) % self.size], members[self.index - 1]
        calls = [
            dist.P2POp(dist.isend, tensor, following, self.group),
            dist.P2POp(dist.irecv, received, preceding, self.group),
        ]
        return Exchange(tensor, received, dist.batch_isend_irecv(calls))


@dataclass(frozen=True)
class Exchange:
    """A pending transfer of one tensor to the next process and another from the previous process."""

    sent: Tensor  # must be kept alive until it is sent
    received: Tensor  # complete after `wait`
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        """Wait for both transfers; return the tensor that was received."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class AttentionBlock:
    """Queries of this process and the keys of one process that they attend to, in pairs of segments.

    If queries and keys are the same tokens, attention is causal and `distance` is 0. If the keys are from an earlier
    part of the same sequence, every query attends to all of them, and the first query is `distance` tokens after the
    first key.
    """

    queries: slice
    keys: slice
    query_bounds: tuple[int, ...]  # within `queries`
    key_bounds: tuple[int, ...]  # within `keys`
    distance: int


@dataclass(frozen=True)
class Share:
    """The tokens of a packed row that one process of a ring holds; `bounds` separates the row's sequences."""

    ring: Ring
    bounds: tuple[int, ...]  # including a last sequence of padding, so that all chunks have the same length

    @classmethod
    def of(cls, bounds: Sequence[int], ring: Ring) -> Share:
        """Create the share of this process, adding a sequence of padding if necessary."""
        chunk = -(-bounds[-1] // (2 * ring.size))
        filled = 2 * ring.size * chunk
        return cls(ring, (*bounds, filled) if filled > bounds[-1] else tuple(bounds))

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk."""
        return self.bounds[-1] // (2 * self.ring.size)

    def starts(self, index: int) -> tuple[int, int]:
        """Return the start positions of a process's two chunks in the row."""
        return index * self.chunk, (2 * self.ring.size - 1 - index) * self.chunk

    def cut(self, row: Tensor) -> Tensor:
        """Return this process's tokens [2 x chunk] of a padded row [tokens]."""
        return torch.cat([row[start : start + self.chunk] for start in self.starts(self.ring.index)])

    def held(self, places: Tensor) -> Tensor:
        """Return the indices into `places`, positions [tokens] in the row, of the tokens that this process holds."""
        chunks = places // self.chunk  # [tokens]
        owners = torch.minimum(chunks, 2 * self.ring.size - 1 - chunks)  # [tokens]: the process that holds each
        return (owners == self.ring.index).nonzero().squeeze(-1)

    def local(self, places: Tensor) -> Tensor:
        """Convert positions in the row to positions among the tokens of this process, which must hold them."""
        early, late = self.starts(self.ring.index)
        return torch.where(places < early + self.chunk, places - early, places - late + self.chunk)

    def join(self, values: Tensor, numbers: Tensor, count: int) -> Tensor:
        """Return [count, ...] on every process; this process contributes `values` at the indices `numbers`."""
        return JoinRows.apply(values, numbers, count, self.ring.group)

    def blocks(self, source: int, window: int | None = None) -> Iterator[AttentionBlock]:
        """Yield the blocks of this process's queries and the keys of process `source` that they attend to."""
        if source == self.ring.index:
            # Triangles: the sequences, or parts of sequences, within each of this process's two chunks.
            bounds = {0, self.chunk, 2 * self.chunk}
            for place, start in enumerate(self.starts(source)):
                inside = (bound - start for bound in self.bounds if start < bound < start + self.chunk)
                bounds |= {place * self.chunk + bound for bound in inside}
            both = slice(0, 2 * self.chunk)
            yield AttentionBlock(both, both, tuple(sorted(bounds)), tuple(sorted(bounds)), 0)
        for query_place, query_start in enumerate(self.starts(self.ring.index)):
            for key_place, key_start in enumerate(self.starts(source)):
                if key_start >= query_start:
                    continue
                # A rectangle: the one sequence that extends from an earlier chunk into a later one, if any. With a
                # sliding window it is reduced to its corner, so that every query in it has at least one key.
                key_end = key_start + self.chunk
                begin, end = next((a, b) for a, b in pairwise(self.bounds) if a <= query_start < b)
                first_key, last_query = max(key_start, begin), min(query_start + self.chunk, end)
                if window is not None:
                    first_key = max(first_key, query_start - window + 1)
                    last_query = min(last_query, key_end - 1 + window)
                queries, keys = last_query - query_start, key_end - first_key
                if queries > 0 and keys > 0:
                    from_query = query_place * self.chunk
                    from_key = key_place * self.chunk + first_key - key_start
                    yield AttentionBlock(
                        slice(from_query, from_query + queries),
                        slice(from_key, from_key + keys),
                        (0, queries),
                        (0, keys),
                        query_start - first_key,
                    )


class JoinRows(torch.autograd.Function):
    """Gather the rows of all processes on each of them.

    Every process computes the same loss from all rows, so the gradient is already complete and is not reduced.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext, values: Tensor, numbers: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(numbers)
        joined = values.new_zeros(count, *values.shape[1:])  # [count, ...]
        joined[numbers] = values
        dist.all_reduce(joined, group=group)  # one process has the row, the others have zeros
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (numbers,) = ctx.saved_tensors
        return gradient[numbers], None, None, None


def check_ring(config: PretrainedConfig, sharding: ShardingFlags) -> None:
    """Reject a model whose layers cannot be split over a sequence, and a head stride that does not divide the heads."""
    text = config.get_text_config()
    values = text.to_dict()
    heads = (values.get("num_key_value_heads") or text.num_attention_heads) // sharding.ds_tensor_parallel_size
    if heads % sharding.ring_head_stride:
        raise ConfigError(
            f"--ring_head_stride {sharding.ring_head_stride} does not divide the model's {counted(heads, 'key head')}"
            " on a device",
            try_this=f"--ring_head_stride {heads}",
        )
    others = set(values.get("layer_types") or ()) - RINGABLE_LAYERS
    if others:
        raise ConfigError(
            f"--ring_attn_size cannot split sequences for {', '.join(sorted(others))} layers",
            try_this="--ring_attn_size 1 --ds_tensor_parallel_size 2",
        )
    if values.get("attn_logit_softcapping"):
        raise ConfigError(
            "--ring_attn_size: this model caps its attention scores, which a ring does not support",
            try_this="--ring_attn_size 1",
        )
    rope = values.get("rope_parameters") or {}  # for the whole model or, in some families, per layer type
    angles = ROPE_OF_THE_LENGTH & {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if angles:
        raise ConfigError(
            f"--ring_attn_size: {angles.pop()} rotary positions depend on the length of the whole sequence, but "
            "each process holds only part of it",
            try_this="--ring_attn_size 1 --ds_tensor_parallel_size 2",
        )
