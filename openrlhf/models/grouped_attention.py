"""Attention for decoding with grouped queries: several query heads read one key head without copies of it.

SDPA's fused kernels accept a mask, which left-padded rows need, only if every query head has keys and values of its
own, so Transformers repeats the whole cache for each new token. A decoding step has one query per head, so the query
heads that share a key head can take the place of query tokens instead:

    query [rows, heads, 1, dim]  -->  [rows, key heads, heads per key head, dim]

The kernel then reads keys and values [rows, key heads, columns, dim] as they are in the cache, once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grouped_sdpa"


def has_groups(config: PretrainedConfig) -> bool:
    """Return whether a model has fewer key heads than query heads."""
    text = config.get_text_config().to_dict()
    heads, key_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(key_heads, int) and 0 < key_heads < heads


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [rows, heads, tokens, dim]
    key: Tensor,  # [rows, key heads, columns, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [rows, 1, tokens, columns]
    *,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention [rows, tokens, heads, dim], in groups if there is one new token per row, else with SDPA."""
    rows, heads, tokens, dim = query.shape
    groups = heads // key.shape[1]
    alike = attention_mask is None or attention_mask.shape[1] == 1  # the same mask for all heads
    if tokens > 1 or groups == 1 or not alike or more.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    grouped = query.reshape(rows, key.shape[1], groups, dim)
    mask = None if attention_mask is None else attention_mask.expand(-1, -1, groups, -1)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
