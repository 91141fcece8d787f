"""Attention over a row shared by a ring of processes, which pass keys and values to each other.

Each process keeps its queries and attends to the keys it receives; partial outputs are merged (blocks.py). For three
processes:

    step        process 0          process 1          process 2
    0           keys of 0          keys of 1          keys of 2         each also starts to send its keys
    1           keys of 2          keys of 0          keys of 1
    2           keys of 1          keys of 2          keys of 0

In the backward pass the keys are passed around again, and the gradients of keys and values follow one step behind.
Each process adds its contribution; after the last step, the gradients have returned to the process that owns the keys.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.models.blocks import AttentionResult, Scoring, attend, block_gradients, merge
from openrlhf.models.chunks import AutogradContext
from openrlhf.models.ring import Exchange, Share

Heads = tuple[slice, slice]  # (all tokens, some heads)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, share: Share, scoring: Scoring) -> Tensor:
    """Return causal attention [tokens, heads, dim] within each sequence, for this process's tokens of the row."""
    return RingAttention.apply(query, key, value, share, scoring)


class RingAttention(torch.autograd.Function):
    """Attention that passes keys, values and their gradients around the ring, a few heads at a time."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, share: Share, scoring: Scoring
    ) -> Tensor:
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for heads, key_heads in strides(query, key, share.ring.head_stride):
            passed = torch.stack([key[key_heads], value[key_heads]])  # [2, tokens, heads, dim]
            output[heads], lse[heads] = ring_forward(query[heads], passed, share, scoring)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.share, ctx.scoring = share, scoring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, output, lse = ctx.saved_tensors
        result = AttentionResult(query, output, lse, gradient)
        to_query, to_key, to_value = (torch.empty_like(part) for part in (query, key, value))
        for heads, key_heads in strides(query, key, ctx.share.ring.head_stride):
            passed = torch.stack([key[key_heads], value[key_heads]])
            to_query[heads], (to_key[key_heads], to_value[key_heads]) = ring_backward(
                result[heads], passed, ctx.share, ctx.scoring
            )
        return to_query, to_key, to_value, None, None


def ring_forward(query: Tensor, passed: Tensor, share: Share, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, heads, dim] and log-sum-exps [tokens, heads] over the keys of all processes."""
    output = torch.zeros_like(query, dtype=torch.float32)
    lse = output.new_full(query.shape[:2], float("-inf"))  # log-sum-exp over no keys
    for source, (key, value) in visits(passed, share):
        for block in share.blocks(source, scoring.window):
            merge(output[block.queries], lse[block.queries], *attend(query, key, value, block, scoring))
    return output, lse


def ring_backward(result: AttentionResult, passed: Tensor, share: Share, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return gradients of this process's queries, and of its keys and values [2, tokens, heads, dim].

    The gradients of keys and values are accumulated on their way around the ring.
    """
    to_query = torch.zeros_like(result.query, dtype=torch.float32)
    exchange: Exchange | None = None
    for source, (key, value) in visits(passed, share):
        found = torch.zeros_like(passed, dtype=torch.float32)  # [2, tokens, heads, dim]
        for block in share.blocks(source, scoring.window):
            parts = block_gradients(result, key, value, block, scoring)
            for total, part in zip((to_query[block.queries], *found[:, block.keys]), parts, strict=True):
                total += part
        if exchange is not None:  # the sum of the previous processes for these keys
            found += exchange.wait()
        exchange = share.ring.pass_on(found)
    assert exchange is not None
    return to_query, exchange.wait()


def visits(passed: Tensor, share: Share) -> Iterator[tuple[int, Tensor]]:
    """Yield (process, its keys and values), starting with this one; the next keys arrive while the caller computes."""
    ring = share.ring
    for step in range(ring.size):
        exchange = ring.pass_on(passed) if step + 1 < ring.size else None
        yield (ring.index - step) % ring.size, passed
        if exchange is not None:
            passed = exchange.wait()


def strides(query: Tensor, key: Tensor, key_heads: int) -> Iterator[tuple[Heads, Heads]]:
    """Yield (query heads, the key heads they use), `key_heads` key heads at a time."""
    group, tokens = query.shape[1] // key.shape[1], slice(None)
    for first in range(0, key.shape[1], key_heads):
        last = first + key_heads
        yield (tokens, slice(first * group, last * group)), (tokens, slice(first, last))
