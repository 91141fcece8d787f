"""Attention over packed sequences: PyTorch's varlen flash kernel on CUDA, SDPA per segment elsewhere.

`segmented_attention` is registered with Transformers as another attention implementation, so any model that takes its
attention from the registry packs exactly: a token attends to its own sequence and nothing else. No compiled package is
needed. `load.py` asks `choose_attention` which implementation to load a model with, and `Network` passes the bounds of
the sequences (`cu_seq_lens_q`) through the model to the kernel. In a ring of processes the same function hands over to
ring_attention.py.
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

SEGMENTED = "openrlhf_segmented"
FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}

_KERNEL = inspect.signature(varlen.varlen_attn).parameters


def choose_attention(requested: str, device: torch.device, packing: bool) -> tuple[str, str | None]:
    """Return the implementation to load a model with, and a line to print if the request cannot be met in full."""
    if requested == "auto":
        return (SEGMENTED if packing or device.type == "cuda" else "sdpa"), None
    package = FLASH_PACKAGES.get(requested)
    if package and (find_spec(package) is None or device.type != "cuda"):
        why = f"{package} is not installed" if device.type == "cuda" else "there is no GPU"
        kernel = "PyTorch's varlen kernel" if device.type == "cuda" else "SDPA"
        return choose_attention("auto", device, packing)[0], f"{requested}: {why}, so {kernel} is used"
    if packing and not package and requested != SEGMENTED:
        return (
            requested,
            f"--attn_implementation {requested} cannot pack: sequences are padded. Try: --attn_implementation auto",
        )
    return requested, None


def fitting_attention(attention: str, model_class: type[PreTrainedModel] | None, config: PretrainedConfig) -> str:
    """Return `attention`, or the next slower one that a model class supports.

    The class is None if it comes with the model's folder instead of Transformers.
    """
    if attention == SEGMENTED and not (model_class and model_class._can_set_attn_implementation()):
        attention = "sdpa"
    return attention if attention != "sdpa" or takes_sdpa(model_class, config) else "eager"


def takes_sdpa(model_class: type[PreTrainedModel] | None, config: PretrainedConfig) -> bool:
    """Return whether SDPA is correct for a model: if the model caps its attention scores, SDPA silently omits that."""
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
    **ignored: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment of one packed row; return [1, tokens, heads, dim].

    If `share` is given, the tokens are those of one process in a ring, and the share defines the segments.
    """
    if softcap is not None or s_aux is not None:
        way_out = "--attn_implementation eager" if share is None else "--ring_attn_size 1 --attn_implementation eager"
        raise ConfigError("this model caps its attention scores or adds sinks", try_this=way_out)
    assert attention_mask is None, "packed rows carry their structure in cu_seq_lens, not in a mask"
    if share is not None:
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window)
        return ring_attention(by_token(query), by_token(key), by_token(value), share, scoring).unsqueeze(0), None
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
    """Return the arguments for causal attention: their names differ between releases of PyTorch.

    Before `enable_gqa` was added (2.12), fewer key heads than query heads were accepted without it.
    """
    options: dict[str, bool | tuple[int, int]] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is not None:
        raise ConfigError("this PyTorch's varlen kernel has no sliding window", try_this="--attn_implementation sdpa")
    else:
        options["is_causal"] = True
    return options


AttentionInterface.register(SEGMENTED, segmented_attention)
