"""Measure whether two computations of the same model agree; the load-time tests share it, and the tokens they use.

The self-test (self_test.py) and the choice of a decoding strategy (rollout/decoding_check.py) compare a fast
computation with the model's own plain one. In fp32 the largest difference counts. In half precision two correct
computations also differ, by the model's own rounding. That is measured: the same weights compute the same tokens in
fp32, one module at a time.
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

FP32_TOLERANCE = 1e-4  # largest difference of a log-prob, in nats
ROUNDINGS = 4.0  # in half precision: mean difference, in multiples of the model's own rounding
LEAST_ROUNDING = 5e-3
SHARDED_ROUNDING = 0.05  # assumed for sharded weights, for which it is not measured
# Errors that third-party code raises on inputs that it does not support.
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
    """Return absolute differences: 0 for a token that both consider impossible (-inf), infinite for NaN."""
    return torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(math.inf)


def relative_error(found: Tensor, own: Tensor, rounding: float | None) -> tuple[float, str]:
    """Return (the difference from the model's own numbers as a fraction of what is allowed, a description of it).

    In fp32 (`rounding` is None) the largest difference counts, relative for numbers beyond 1 in magnitude. Otherwise
    the mean one does, because rounding blurs single numbers.
    """
    off = distance(found, own)
    if rounding is None:
        error, allowed = float((off / own.abs().clamp(min=1.0)).max()), FP32_TOLERANCE
    else:
        error, allowed = float(off.mean()), ROUNDINGS * max(rounding, LEAST_ROUNDING)
    return error / allowed, f"is off by {error:.2g} ({allowed:.2g} allowed)"


def measure_rounding(decoder: PreTrainedModel, own: Tensor, compute: Callable[[], Tensor]) -> float | None:
    """Return the mean difference between a half-precision model and the same weights in fp32; None for fp32.

    `own` is the result of the model's own forward, and `compute` computes it again.
    """
    if decoder.dtype == torch.float32:
        return None
    if is_sharded(decoder):
        return SHARDED_ROUNDING
    with in_fp32(decoder):
        exact = compute()
    return float(distance(own, exact).mean())


def is_sharded(model: nn.Module) -> bool:
    """True under ZeRO-3, which marks its parameters with `ds_id`."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def describe_error(error: Exception) -> str:
    """Describe an error in less than a line."""
    if isinstance(error, ConfigError):
        return error.message
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100] if lines else 'no message'}"
