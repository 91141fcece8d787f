"""Attention over packed sequences: PyTorch's varlen flash kernel on CUDA, SDPA per segment elsewhere.

`segmented_attention` is registered with Transformers as an attention implementation. Every model that uses the registry
can therefore run on packed rows, with each token attending only to its own sequence, and without a compiled package.
`load.py` calls `choose_attention` to select the implementation for a model, and `Network` passes the sequence bounds
(`cu_seq_lens_q`) through the model to the kernel. In a ring of processes, `segmented_attention` calls
`ring_attention`; for rows with shared prefixes, it calls `shared_prefix_attention`.
"""

import inspect
from collections.abc import Container
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.blocks import Scoring
from openrlhf.models.ring import Share
from openrlhf.models.ring_attention import ring_attention
from openrlhf.models.shared_prefix_attention import shared_prefix_attention
from openrlhf.types import SharedPrefixes

SEGMENTED = "openrlhf_segmented"
FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}

_KERNEL = inspect.signature(varlen.varlen_attn).parameters


def choose_attention(requested: str, device: torch.device, packing: bool) -> tuple[str, str | None]:
    """Return the implementation to load a model with, and a message if the request cannot be fully met."""
    if requested == "auto":
        return (SEGMENTED if packing or device.type == "cuda" else "sdpa"), None
    package = FLASH_PACKAGES.get(requested)
    if package and (find_spec(package) is None or device.type != "cuda"):
        why = f"{package} is not installed" if device.type == "cuda" else "there is no GPU"
        kernel = "PyTorch's varlen kernel" if device.type == "cuda" else "SDPA"
        line = f"--attn_implementation {requested}: {why}, so {kernel} is used instead"
        return choose_attention("auto", device, packing)[0], line
    return requested, None


def fitting_attention(attention: str, model_class: type[PreTrainedModel] | None, config: PretrainedConfig) -> str:
    """Return `attention`, or the next slower implementation that the model class supports.

    The class is None if its code is in the model's folder instead of Transformers.
    """
    if attention == SEGMENTED and not (model_class and model_class._can_set_attn_implementation()):
        attention = "sdpa"
    return attention if attention != "sdpa" or takes_sdpa(model_class, config) else "eager"


def takes_sdpa(model_class: type[PreTrainedModel] | None, config: PretrainedConfig) -> bool:
    """Return True if SDPA is correct for a model; SDPA silently omits the score cap of some models."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping")
    return not capped and (model_class is None or model_class._supports_sdpa)


def segmented_attention(  # noqa: PLR0913 - the signature is the registry's
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, dim]
    key: Tensor,  # [1, key_heads, tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    share: Share | None = None,
    prefixes: SharedPrefixes | None = None,
    **ignored: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment of one packed row; return [1, tokens, heads, dim].

    If `share` is given, the tokens belong to one process in a ring, and the share defines the segments. With
    `prefixes`, the row holds prefixes shared by several sequences; these are shorter than any sliding window.
    """
    if softcap is not None or s_aux is not None:
        way_out = "--attn_implementation eager" if share is None else "--ring_attn_size 1 --attn_implementation eager"
        raise ConfigError(
            "this model uses attention score caps or sinks, which the packed kernel does not support", try_this=way_out
        )
    assert attention_mask is None, "packed rows are described by cu_seq_lens, not by a mask"
    if share is not None:
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window)
        return ring_attention(by_token(query), by_token(key), by_token(value), share, scoring).unsqueeze(0), None
    if prefixes is not None:
        parts = (by_token(query), by_token(key), by_token(value))
        return shared_prefix_attention(*parts, prefixes, scaling).unsqueeze(0), None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        parts = (by_token(query), by_token(key), by_token(value))
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        kernel: Any = varlen.varlen_attn  # its parameters differ between releases
        return kernel(*parts, *bounds, scale=scaling, **kernel_options(sliding_window, _KERNEL)).unsqueeze(0), None
    outputs: list[Tensor] = []  # [1, heads, tokens of a segment, dim] each
    gqa = query.shape[1] != key.shape[1]
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        parts = (query[:, :, start:end], key[:, :, start:end], value[:, :, start:end])
        visible = None  # causal attention needs no mask
        if sliding_window is not None and end - start > sliding_window:
            places = torch.arange(end - start, device=query.device)
            distance = places[:, None] - places  # [queries, keys]
            visible = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            scaled_dot_product_attention(
                *parts, attn_mask=visible, is_causal=visible is None, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def by_token(tensor: Tensor) -> Tensor:
    """Reshape [1, heads, tokens, dim] to [tokens, heads, dim]."""
    return tensor.squeeze(0).transpose(0, 1).contiguous()


def kernel_options(sliding_window: int | None, known: Container[str]) -> dict[str, bool | tuple[int, int]]:
    """Return the keyword arguments for causal attention, whose names differ between PyTorch releases.

    Releases before 2.12 have no `enable_gqa` and accept fewer key heads than query heads without it.
    """
    options: dict[str, bool | tuple[int, int]] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is not None:
        raise ConfigError(
            "the varlen kernel of this PyTorch release does not support sliding windows",
            try_this="--attn_implementation sdpa",
        )
    else:
        options["is_causal"] = True
    return options


AttentionInterface.register(SEGMENTED, segmented_attention)
