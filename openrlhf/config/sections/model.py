"""Flags for models: source, precision, adapters and heads.

Commands that only load a model have a subset of the flags of commands that train one, so the sections inherit from
each other. `models.load` takes `LoadingFlags` and therefore accepts every subclass.
"""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import BELOW_ONE, NOT_NEGATIVE, POSITIVE, flag

DType = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Precision"""

    param_dtype: DType = flag("bf16", "Dtype of the weights; on a CPU, everything is computed in fp32.")


@dataclass(frozen=True, kw_only=True)
class LoadingFlags(PrecisionFlags):
    """Model loading"""

    attn_implementation: str = flag(
        "auto",
        "Attention implementation, by its Transformers name; auto uses the varlen kernel on CUDA and SDPA on a CPU.",
    )
    load_in_4bit: bool = flag(
        False, "Load the base model in 4-bit NF4 with double quantisation (needs bf16, bitsandbytes).", essential=True
    )
    experts_implementation: str | None = flag(
        None, "Mixture-of-experts implementation, by its Transformers name, such as eager or grouped_mm."
    )
    disable_fast_tokenizer: bool = flag(False, "Accepted, but unused: Transformers has only fast tokenizers.")
    revision: str | None = flag(
        None, "Commit hash, tag or branch of the command's model on its hub; for other models, write name@revision."
    )
    trust_remote_code: bool = flag(
        False, "Allow code from the model or dataset repository to run; upstream always allows it."
    )
    skip_self_test: bool = flag(
        False, "Skip the self-test against the model's own forward pass (about a second per model)."
    )
    use_ms: bool = flag(False, "Download models and datasets from ModelScope.")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Device; auto uses a GPU if there is one.")


@dataclass(frozen=True, kw_only=True)
class ServedModelFlags(LoadingFlags):
    """Model"""

    pretrain: str | None = flag(
        None,
        "Model folder or hub name; name@revision selects a commit, tag or branch.",
        required="./model",
        essential=True,
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ServedModelFlags):
    """Model"""

    use_liger_kernel: bool = flag(False, "Use the Liger package's fused kernels in every model (needs a GPU).")
    aux_loss_coef: float = flag(
        0.0,
        "Weight of the mixture-of-experts load-balancing loss, over all tokens of an optimizer step. If a step has "
        "several micro-batches or ranks, each micro-batch costs one more forward pass, without gradients; values up to "
        "1e-8 disable it.",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA"""

    lora_rank: int = flag(0, "Rank of the adapters; 0 trains all weights.", NOT_NEGATIVE, essential=True)
    lora_alpha: int = flag(16, "Adapters are scaled by alpha / rank.", POSITIVE, needs="lora_rank")
    lora_dropout: float = flag(0.0, "Dropout before the adapters.", BELOW_ONE, needs="lora_rank")
    target_modules: tuple[str, ...] = flag(("all-linear",), "Modules that get an adapter.", needs="lora_rank")


@dataclass(frozen=True, kw_only=True)
class ValueHeadFlags:
    """Scalar head"""

    value_head_prefix: str = flag(
        "score", "Name of the scalar head; a name in the model's config.json takes precedence."
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceFlags:
    """Reference model"""

    ref_pretrain: str | None = flag(None, "Frozen reference model (default: --pretrain).")
    ref_offload: bool = flag(False, "Keep the reference model on the CPU between forward passes.")
