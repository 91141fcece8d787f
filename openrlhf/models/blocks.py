"""Attention between a block of queries and a block of keys, with gradients and outputs that can be merged.

A process in a ring attends to the keys of all processes, one block after another (ring_attention.py). For each query,
the output o and the log-sum-exp l of its scores are kept, so that the results of two blocks can be merged:

    l = log(exp(l1) + exp(l2))        o = exp(l1 - l) o1 + exp(l2 - l) o2        (`merge`)

Given the final l and o, the gradient is a sum over blocks (FlashAttention, arXiv 2205.14135, appendix B.2). On CUDA in
half precision, this uses PyTorch's flash kernel; on other devices, in fp32 and with a sliding window, it uses matrix
products over tiles of queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from openrlhf.models.ring import AttentionBlock

Bounds = tuple[int, ...]
TILE = 1024  # number of queries processed together; limits the scores to [heads, TILE, keys]


@dataclass(frozen=True)
class Scoring:
    """The scale of attention scores, and the sliding window in tokens, including the query (None: no window)."""

    scale: float
    window: int | None = None


@dataclass(frozen=True)
class AttentionResult:
    """The result of attention over the keys of all processes, and the gradient of its output."""

    query: Tensor  # [tokens, heads, dim]
    output: Tensor  # [tokens, heads, dim]
    lse: Tensor  # [tokens, heads]
    gradient: Tensor  # [tokens, heads, dim]

    def __getitem__(self, part: slice | tuple[slice, slice]) -> "AttentionResult":
        """Select tokens, or tokens and heads."""
        return AttentionResult(self.query[part], self.output[part], self.lse[part], self.gradient[part])


def attend(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return outputs [queries, heads, dim] and log-sum-exps [queries, heads] of a block, in fp32.

    Query, key and value are [tokens, heads, dim]; the block selects the tokens.
    """
    query, key, value = query[block.queries], key[block.keys], value[block.keys]
    if takes_flash(query, scoring):
        bounds = flash_bounds(block.query_bounds, block.key_bounds, query.device)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *bounds, 0.0, block.distance == 0, False, scale=scoring.scale
        )
        assert lse.shape == (query.shape[1], query.shape[0]), "expected one log-sum-exp per head and token"
        return output.float(), lse.T
    output, lse = query.new_empty(query.shape, dtype=torch.float32), query.new_empty(query.shape[:2]).float()
    for queries, keys, distance in tiles(block, scoring.window):
        scores = masked_scores(query[queries], key[keys], distance, scoring)  # [key heads, group, queries, keys]
        sums = scores.logsumexp(-1)  # [key heads, group, queries]
        weights = (scores - sums[..., None]).exp()  # [key heads, group, queries, keys]
        output[queries] = products(weights, value[keys]).float()
        lse[queries] = sums.flatten(0, 1).T
    return output, lse


def block_gradients(
    result: AttentionResult, key: Tensor, value: Tensor, block: AttentionBlock, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the block's queries, keys and values, each [tokens, heads, dim]."""
    result, key, value = result[block.queries], key[block.keys], value[block.keys]
    if takes_flash(result.query, scoring):
        given = (result.gradient, result.query, key, value, result.output, result.lse.T.contiguous())
        bounds = flash_bounds(block.query_bounds, block.key_bounds, key.device)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=key.device), torch.empty(0, device=key.device)
        return torch.ops.aten._flash_attention_backward(
            *given, *bounds, 0.0, block.distance == 0, *no_dropout, scale=scoring.scale
        )
    to_query, to_key, to_value = (torch.zeros_like(part, dtype=torch.float32) for part in (result.query, key, value))
    group = (key.shape[1], -1)  # unflatten heads to [key heads, group]: each group shares a key head
    # The correction term of the softmax gradient, [queries, heads].
    pull = (result.gradient.float() * result.output.float()).sum(-1)
    for queries, keys, distance in tiles(block, scoring.window):
        # query and gradient: [queries, key heads, group, dim]; scores and weights: [key heads, group, queries, keys]
        query, gradient = (part[queries].unflatten(1, group) for part in (result.query, result.gradient))
        scores = masked_scores(result.query[queries], key[keys], distance, scoring)
        weights = (scores - result.lse[queries].T.unflatten(0, group)[..., None]).exp()
        to_weights = torch.einsum("qhgd,khd->hgqk", gradient, value[keys]).float()
        to_scores = weights * (to_weights - pull[queries].T.unflatten(0, group)[..., None]) * scoring.scale
        to_query[queries] = products(to_scores, key[keys]).float()
        to_key[keys] += torch.einsum("hgqk,qhgd->khd", to_scores.to(key.dtype), query)
        to_value[keys] += torch.einsum("hgqk,qhgd->khd", weights.to(value.dtype), gradient)
    return to_query, to_key, to_value


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the results of the same queries for other keys into `output` and `lse`, in place.

    Outputs are [queries, heads, dim], log-sum-exps [queries, heads].
    """
    whole = torch.logaddexp(lse, other_lse)
    output.mul_((lse - whole).exp()[..., None]).add_(other * (other_lse - whole).exp()[..., None])
    lse.copy_(whole)


def takes_flash(query: Tensor, scoring: Scoring) -> bool:
    """Return True if PyTorch's flash kernel can be used."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scoring.window is None


@lru_cache(maxsize=512)
def flash_bounds(query_bounds: Bounds, key_bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return cumulative and maximum lengths for the kernel; cached, because all layers use the same values."""
    queries, keys = (torch.tensor(side, dtype=torch.int32, device=device) for side in (query_bounds, key_bounds))
    longest_query, longest_key = (max(b - a for a, b in pairwise(side)) for side in (query_bounds, key_bounds))
    return queries, keys, longest_query, longest_key


def tiles(block: AttentionBlock, window: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Yield the queries of each tile, the keys visible to them, and the distance from first key to first query."""
    sides = zip(pairwise(block.query_bounds), pairwise(block.key_bounds), strict=True)
    for (start, end), (first_key, last_key) in sides:
        for place in range(start, end, TILE):
            stop, distance = min(place + TILE, end), block.distance + place - start
            unseen = 0 if window is None else max(0, distance - window + 1)
            visible = min(last_key, first_key + distance + stop - place)
            yield slice(place, stop), slice(first_key + unseen, visible), distance - unseen


def masked_scores(query: Tensor, key: Tensor, distance: int, scoring: Scoring) -> Tensor:
    """Return scores [key heads, group, queries, keys] in fp32, -inf for keys that are not visible to a query."""
    query = query.unflatten(1, (key.shape[1], -1))  # [queries, key heads, group, dim]
    scores = torch.einsum("qhgd,khd->hgqk", query, key).float() * scoring.scale
    places = torch.arange(len(query), device=query.device) + distance  # [queries]
    back = places[:, None] - torch.arange(len(key), device=query.device)  # [queries, keys]
    hidden = back < 0 if scoring.window is None else (back < 0) | (back >= scoring.window)
    return scores.masked_fill_(hidden, float("-inf"))


def products(weights: Tensor, value: Tensor) -> Tensor:
    """Return sums [queries, heads, dim] of values (or keys), weighted by [key heads, group, queries, keys]."""
    return torch.einsum("hgqk,khd->qhgd", weights.to(value.dtype), value).flatten(1, 2)
