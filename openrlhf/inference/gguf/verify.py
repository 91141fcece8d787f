"""Check a GGUF file by reading it again: its tensors with the `gguf` package, its outputs with Transformers.

Transformers reads GGUF files with its own table of names and its own inverse conversions, so equal outputs show that
every tensor of the file is right.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from openrlhf.config.sections.export import GGUFType
from openrlhf.errors import BackendError
from openrlhf.inference.gguf.families import Family, file_tensors

SAMPLE = "The capital of France is Paris. What is 12 + 30? Answer: 42.\nOne, two, three."
# Largest allowed difference of a weight, relative to the largest weight of its tensor: half a step of the type's
# precision, rounded up (q8_0 also rounds the scale of its blocks).
WEIGHT_TOLERANCE: dict[GGUFType, float] = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 200}
# Logit differences that rounding can cause, relative to their spread; a misplaced tensor causes 0.1 or more.
LOGIT_TOLERANCE: dict[GGUFType, float] = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2, "q8_0": 1e-1}


@dataclass(frozen=True)
class Agreement:
    """How closely a reloaded file agrees with its model."""

    logits: float  # difference of logits, relative to their spread
    same: int  # positions at which both choose the same next token
    positions: int

    def __str__(self) -> str:
        return f"logits differ by {self.logits:.2%}, next tokens agree at {self.same} of {self.positions} positions"


def compare_tensors(path: Path, model: PreTrainedModel, family: Family, weights: GGUFType) -> float:
    """Return the largest relative difference of a weight; raise if a tensor is missing or differs too much."""
    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    worst = 0.0
    for tensor in file_tensors(model, family):
        found = stored.pop(tensor.name, None)
        if found is None:
            raise BackendError(f"the file {path} lacks the tensor {tensor.name}")
        expected = tensor.value()
        read = torch.from_numpy(dequantize(found.data, found.tensor_type).copy()).reshape(expected.shape)
        difference = float((read - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        worst = max(worst, difference)
        if not difference <= WEIGHT_TOLERANCE[weights]:  # also true for NaN
            raise BackendError(f"the tensor {tensor.name} in {path} differs from the model's by {difference:.2%}")
    if stored:
        raise BackendError(f"the file {path} has unexpected tensors, such as {min(stored)}")
    return worst


@torch.no_grad()
def sample_logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the model's logits for a short text [tokens, vocabulary]."""
    ids = tokenizer(SAMPLE, add_special_tokens=False, return_tensors="pt").input_ids
    return model.eval()(input_ids=ids).logits[0].float()


def reload_logits(path: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the logits of the file for the same text, computed by Transformers.

    The config is the model's own, because Transformers does not read all of it from a file (Llama 3's rotary factors).
    For Mistral, which GGUF files store as Llama, Llama's config is used.
    """
    if config.model_type == "mistral":
        config = LlamaConfig.from_dict(config.to_dict() | {"model_type": "llama"})
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=torch.float32
        )
    return sample_logits(model, tokenizer)


def compare_logits(expected: Tensor, found: Tensor, weights: GGUFType) -> Agreement:
    """Compare logits [tokens, vocabulary]; raise if they differ by more than the type's rounding explains."""
    # The same number added to all logits of a position changes nothing.
    centred, other = (logits - logits.mean(-1, keepdim=True) for logits in (expected, found))
    difference = float((other - centred).pow(2).mean().sqrt() / centred.pow(2).mean().sqrt())
    agreement = Agreement(difference, int((found.argmax(-1) == expected.argmax(-1)).sum()), len(expected))
    if not difference <= LOGIT_TOLERANCE[weights]:  # also true for NaN
        raise BackendError(
            f"the logits of the GGUF file differ from the model's: {agreement} (expected at most"
            f" {LOGIT_TOLERANCE[weights]:.1%})",
            try_this="convert_hf_to_gguf.py of llama.cpp, and please report this model",
        )
    return agreement
