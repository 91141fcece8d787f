"""Attention over a row that a ring shares: keys and values go round, and everyone looks at those that are for it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.models.blocks import Scoring, Seen, attend, block_gradients, merge
from openrlhf.models.ring import Arriving, Share

Heads = tuple[slice, slice]  # of tokens, all of them, and of heads


def ring_attention(query: Tensor, key: Tensor, value: Tensor, share: Share, scoring: Scoring) -> Tensor:
    """Causal attention within each sequence, for this process's tokens [tokens, heads, dim] of the row."""
    return RingAttention.apply(query, key, value, share, scoring)


class RingAttention(torch.autograd.Function):
    """Passes some heads' keys and values round the ring, then the next ones'; backwards their gradients go along."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, share: Share, scoring: Scoring
    ) -> Tensor:
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for heads, key_heads in strides(query, key, share.ring.head_stride):
            passed = torch.stack([key[key_heads], value[key_heads]])
            output[heads], lse[heads] = look_round(query[heads], passed, share, scoring)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.share, ctx.scoring = share, scoring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, output, lse = ctx.saved_tensors
        seen = Seen(query, output, lse, gradient)
        to_query, to_key, to_value = (torch.empty_like(part) for part in (query, key, value))
        for heads, key_heads in strides(query, key, ctx.share.ring.head_stride):
            passed = torch.stack([key[key_heads], value[key_heads]])
            to_query[heads], (to_key[key_heads], to_value[key_heads]) = gradients_round(
                seen[heads], passed, ctx.share, ctx.scoring
            )
        return to_query, to_key, to_value, None, None


def look_round(query: Tensor, passed: Tensor, share: Share, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps over the keys of all; nothing seen yet has a log-sum-exp of minus infinity."""
    output = torch.zeros_like(query, dtype=torch.float32)
    lse = output.new_full(query.shape[:2], float("-inf"))
    for source, (key, value) in visits(passed, share):
        for block in share.blocks(source, scoring.window):
            merge(output[block.queries], lse[block.queries], *attend(query, key, value, block, scoring))
    return output, lse


def gradients_round(seen: Seen, passed: Tensor, share: Share, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Gradients of the queries here, and of the keys and values [2, tokens, heads, dim] after they came home."""
    to_query = torch.zeros_like(seen.query, dtype=torch.float32)
    arriving: Arriving | None = None
    for source, (key, value) in visits(passed, share):
        found = torch.zeros_like(passed, dtype=torch.float32)
        for block in share.blocks(source, scoring.window):
            parts = block_gradients(seen, key, value, block, scoring)
            for total, part in zip((to_query[block.queries], *found[:, block.keys]), parts, strict=True):
                total += part
        if arriving is not None:  # what the processes before found for these keys came in meanwhile
            found += arriving.wait()
        arriving = share.ring.pass_on(found)
    assert arriving is not None
    return to_query, arriving.wait()


def visits(passed: Tensor, share: Share) -> Iterator[tuple[int, Tensor]]:
    """Each process's keys and values, the own ones first; the next are on their way while these are looked at."""
    ring = share.ring
    for step in range(ring.size):
        arriving = ring.pass_on(passed) if step + 1 < ring.size else None
        yield (ring.index - step) % ring.size, passed
        if arriving is not None:
            passed = arriving.wait()


def strides(query: Tensor, key: Tensor, key_heads: int) -> Iterator[tuple[Heads, Heads]]:
    """Query heads and the key heads that they share, some key heads at a time."""
    group, tokens = query.shape[1] // key.shape[1], slice(None)
    for first in range(0, key.shape[1], key_heads):
        last = first + key_heads
        yield (tokens, slice(first * group, last * group)), (tokens, slice(first, last))
