"""Patch Liger's fused kernels into a loaded model with a vocabulary or scalar head (--use_liger_kernel)."""

import torch
from transformers import PreTrainedModel

from openrlhf.config.sections.model import LoadingFlags, ModelFlags
from openrlhf.monitor import say


def uses_liger(loading: LoadingFlags, model_type: str, device: torch.device) -> bool:
    """Return True if Liger is requested and supports this device and model family."""
    asked = isinstance(loading, ModelFlags) and loading.use_liger_kernel
    return asked and device.type != "cpu" and liger_knows(model_type)


def liger_knows(model_type: str) -> bool:
    """Return True if the installed Liger has kernels for this model family."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def apply_liger(model: PreTrainedModel) -> None:
    """Patch in fused norms, MLPs and rotary embeddings; not the loss, because `Network` never computes full logits."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    try:
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    except (TypeError, ValueError) as error:  # for some families, Liger patches only language models
        say(f"--use_liger_kernel cannot patch a {type(model).__name__}, so it runs without Liger: {error}")
