"""Attention in a row that holds each prefix shared by several sequences once (`data.shared_prefixes`).

Every segment of the row attends to itself, and a continuation also attends to all of its prefix. On CUDA in half
precision, these are two calls of PyTorch's flash kernel, whose results are merged by their log-sum-exps (blocks.py):

    causal within all segments              queries  p p a b c d e      keys  p p a b c d e
    continuations to their prefix           queries      a b c          keys  p p

Elsewhere, each continuation runs with the keys of its prefix and its own, by SDPA.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from openrlhf.models.blocks import merge
from openrlhf.models.chunks import AutogradContext
from openrlhf.types import SharedPrefixes


def shared_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, prefixes: SharedPrefixes, scale: float | None
) -> Tensor:
    """Return outputs [tokens, heads, dim]; query, key and value are [tokens, heads, dim]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        bounds = (prefixes.segment_bounds, prefixes.prefix_bounds, prefixes.continuation_bounds)
        longest = (prefixes.longest_segment, prefixes.longest_prefix, prefixes.longest_continuation)
        counts = (prefixes.num_prefix_tokens, prefixes.num_continuation_tokens)
        return flash_attention(query, key, value, *bounds, *longest, *counts, scale)[0]
    outputs: list[Tensor] = []  # [1, heads, tokens of a segment, dim] each
    # [1, heads, tokens, dim]: with fewer dimensions, PyTorch uses a slow kernel
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    prefix_bounds = prefixes.prefix_bounds.tolist()
    first = prefix_bounds[-1]  # continuations start here
    ends = [first + place for place in prefixes.continuation_bounds.tolist()[1:]]  # ends of each prefix's continuations
    group = 0
    for start, end in pairwise(prefixes.segment_bounds.tolist()):
        keys, values = key[:, :, start:end], value[:, :, start:end]
        visible = None  # causal attention needs no mask
        while group < len(ends) and start >= max(first, ends[group]):
            group += 1
        if start >= first and group < len(ends):
            own = slice(prefix_bounds[group], prefix_bounds[group + 1])
            keys, values = torch.cat([key[:, :, own], keys], 2), torch.cat([value[:, :, own], values], 2)
            shape = (end - start, keys.shape[2])  # queries and keys
            visible = query.new_ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                keys,
                values,
                attn_mask=visible,
                is_causal=visible is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


# A custom operator, which torch.compile calls without tracing into it.
@torch.library.custom_op("openrlhf::shared_prefix_flash_attention", mutates_args=(), device_types="cuda")
def flash_attention(  # noqa: PLR0913 - operators take tensors and numbers, not dataclasses
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    prefixes: Tensor,
    continuations: Tensor,
    longest_segment: int,
    longest_prefix: int,
    longest_continuation: int,
    num_prefix_tokens: int,
    num_continuation_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, heads, dim] and log-sum-exps [heads, tokens]."""
    shared = slice(num_prefix_tokens)
    continued = slice(num_prefix_tokens, num_prefix_tokens + num_continuation_tokens)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, segments, segments, longest_segment, longest_segment, 0.0, True, False, scale=scale
    )
    to_prefix, prefix_lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query[continued], key[shared], value[shared], continuations, prefixes),
        *(longest_continuation, longest_prefix, 0.0, False, False),
        scale=scale,
    )
    merged, merged_lse = output[continued].float(), lse[:, continued].T.contiguous()
    merge(merged, merged_lse, to_prefix.float(), prefix_lse.T)
    output[continued], lse[:, continued] = merged.to(output.dtype), merged_lse.T
    return output, lse


@flash_attention.register_fake
def _(query: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("openrlhf::shared_prefix_flash_gradients", mutates_args=(), device_types="cuda")
def flash_gradients(  # noqa: PLR0913 - operators take tensors and numbers, not dataclasses
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    segments: Tensor,
    prefixes: Tensor,
    continuations: Tensor,
    longest_segment: int,
    longest_prefix: int,
    longest_continuation: int,
    num_prefix_tokens: int,
    num_continuation_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value: a sum over both calls, given the merged output."""
    device = query.device
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    shared = slice(num_prefix_tokens)
    continued = slice(num_prefix_tokens, num_prefix_tokens + num_continuation_tokens)
    to_query, to_key, to_value = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, output, lse, segments, segments),
        *(longest_segment, longest_segment, 0.0, True, *no_dropout),
        scale=scale,
    )
    parts = torch.ops.aten._flash_attention_backward(
        *(gradient[continued], query[continued], key[shared], value[shared], output[continued]),
        *(lse[:, continued].contiguous(), continuations, prefixes, longest_continuation, longest_prefix),
        *(0.0, False, *no_dropout),
        scale=scale,
    )
    for total, part in zip((to_query[continued], to_key[shared], to_value[shared]), parts, strict=True):
        total += part
    return to_query, to_key, to_value


@flash_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *bounds = inputs[:6]
    ctx.save_for_backward(query, key, value, *output, *bounds)
    ctx.numbers = inputs[6:]


def _backward(ctx: AutogradContext, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = flash_gradients(gradient.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *([None] * 9)


flash_attention.register_autograd(_backward, setup_context=_save)
