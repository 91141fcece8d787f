"""Measure whether two computations of the same model agree.

The self-test (self_test.py) and the choice of a decoding strategy (rollout/decoding_check.py) compare a fast
computation with the model's own forward on random tokens. In fp32, the largest difference is compared with a fixed
tolerance. In half precision, even correct computations differ by rounding errors, so the tolerance is a multiple of the
model's rounding error, which is measured by running the same weights and tokens in fp32, one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.modes import in_fp32

FP32_TOLERANCE = 1e-4  # maximum difference between log-probs, in nats
ROUNDINGS = 4.0  # maximum mean difference in half precision, as a multiple of the model's rounding error
LEAST_ROUNDING = 5e-3
SHARDED_ROUNDING = 0.05  # assumed for sharded weights, whose rounding error is not measured
# Errors that third-party code may raise for unsupported inputs.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, ImportError, LookupError, NotImplementedError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def random_rows(vocabulary: int, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
    """Return random tokens from the middle of the vocabulary, away from special tokens at either end."""
    random = np.random.default_rng(0)
    low, high = vocabulary // 4, max(3 * vocabulary // 4, vocabulary // 4 + 2)
    return [random.integers(low, high, length, dtype=np.int32) for length in lengths]


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """Return absolute differences: 0 if both values are -inf (impossible tokens), infinite if either is NaN."""
    return torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(math.inf)


def relative_error(found: Tensor, own: Tensor, rounding: float | None) -> tuple[float, str]:
    """Return (difference from the model's own results / allowed difference, description of the difference).

    In fp32 (`rounding` is None), use the largest difference, relative to values above 1 in magnitude. In half
    precision, use the mean difference, because single values are too noisy.
    """
    off = distance(found, own)
    if rounding is None:
        error, allowed = float((off / own.abs().clamp(min=1.0)).max()), FP32_TOLERANCE
    else:
        error, allowed = float(off.mean()), ROUNDINGS * max(rounding, LEAST_ROUNDING)
    return error / allowed, f"differs from the model's own results by {error:.2g} ({allowed:.2g} allowed)"


def measure_rounding(
    decoder: PreTrainedModel, own: Tensor, compute: Callable[[], Tensor], dtype: torch.dtype
) -> float | None:
    """Return the mean difference between a half-precision model and the same weights in fp32; None for fp32.

    `own` is the result of the model's own forward, and `compute` computes it again. `dtype` is the precision of both.
    """
    if dtype == torch.float32:
        return None
    if is_sharded(decoder):
        return SHARDED_ROUNDING
    with in_fp32(decoder):
        exact = compute()
    return float(distance(own, exact).mean())


def is_sharded(model: nn.Module) -> bool:
    """Return True for a model under ZeRO-3, whose parameters have a `ds_id`, or FSDP, where they have a mesh."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh") for parameter in model.parameters())


def describe_error(error: Exception) -> str:
    """Describe an error in a short phrase."""
    if isinstance(error, ConfigError):
        return error.message
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100] if lines else 'no message'}"
