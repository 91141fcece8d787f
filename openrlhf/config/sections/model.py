"""Flags about models: source, precision, adapters and heads."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag

DType = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Precision"""

    param_dtype: DType = flag("bf16", "dtype of the weights; on a CPU everything computes in fp32, and a line says so")


@dataclass(frozen=True, kw_only=True)
class LoadingFlags(PrecisionFlags):
    """Model loading"""

    attn_implementation: str = flag(
        "auto", "auto takes the varlen kernel on CUDA and SDPA on CPU; or a name Transformers knows"
    )
    load_in_4bit: bool = flag(
        False, "load the base in 4-bit NF4 with double quantisation (needs bf16 and bitsandbytes)"
    )
    experts_implementation: str | None = flag(
        None, "how experts are computed, as Transformers names it; none lets it choose"
    )
    disable_fast_tokenizer: bool = flag(False, "accepted; Transformers has only fast tokenizers")
    trust_remote_code: bool = flag(False, "run code that a model or dataset folder brings along; upstream always does")
    skip_self_test: bool = flag(
        False, "do not compare a loaded model with its own forward before using it (about a second)"
    )
    use_ms: bool = flag(False, "take models and datasets from ModelScope")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto takes a GPU where there is one")


@dataclass(frozen=True, kw_only=True)
class ServedModelFlags(LoadingFlags):
    """Model"""

    pretrain: str | None = flag(None, "model folder or hub name")


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ServedModelFlags):
    """Model"""

    use_liger_kernel: bool = flag(False, "fused kernels of the Liger package, in every model of the run (needs a GPU)")
    aux_loss_coef: float = flag(0.0, "weight of a mixture-of-experts' load-balancing loss; on above 1e-8")


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA"""

    lora_rank: int = flag(0, "rank of the adapters; 0 trains all weights")
    lora_alpha: int = flag(16, "scale of the adapters: alpha / rank")
    lora_dropout: float = flag(0.0, "dropout in front of the adapters")
    target_modules: tuple[str, ...] = flag(("all-linear",), "modules that get an adapter")


@dataclass(frozen=True, kw_only=True)
class ValueHeadFlags:
    """Scalar head"""

    value_head_prefix: str = flag("score", "name of the scalar head; the value in a model's config.json wins")


@dataclass(frozen=True, kw_only=True)
class ReferenceFlags:
    """Reference model"""

    ref_pretrain: str | None = flag(None, "frozen reference model; none takes --pretrain")
    ref_offload: bool = flag(False, "keep the reference on the CPU between its forward passes")
