"""Write a model and its tokenizer to a GGUF file, one tensor at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config.sections.export import GGUFType
from openrlhf.errors import ConfigError
from openrlhf.inference.gguf.families import Family, add_hyperparameters, family_of, file_tensors
from openrlhf.inference.gguf.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class GGUFPlan:
    """Contents of a file other than the weights."""

    family: Family
    vocabulary: Vocabulary
    name: str
    weights: GGUFType
    chat_template: str | None
    add_bos: bool  # whether runtimes put the BOS token before a prompt


def check_exportable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Family, Vocabulary]:
    """Return family and vocabulary; raise ConfigError if the file could not express the model or its tokenizer."""
    family = family_of(model.config)
    embeddings: Any = model.get_input_embeddings()
    size: int = embeddings.weight.shape[0]
    if size != model.config.vocab_size:
        raise ConfigError(f"wrong number of embeddings: expected vocab_size {model.config.vocab_size}, got {size}")
    return family, read_vocabulary(tokenizer, size)


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plan: GGUFPlan) -> None:
    """Write the file; a tensor is converted only when it is written, so no second copy of the model is needed."""
    import gguf

    writer = gguf.GGUFWriter(path, plan.family.architecture)
    writer.add_name(plan.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if plan.weights == "f32" else f"MOSTLY_{plan.weights.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(writer, model.config, plan.family)
    plan.vocabulary.add_to(writer)
    add_special_tokens(writer, tokenizer, plan)

    tensors = list(file_tensors(model, plan.family))
    for tensor in tensors:
        shape = tuple(tensor.weight.shape)
        stored = stored_type(shape, plan.weights)
        size = math.prod(gguf.quants.quant_shape_to_byte_shape(shape, stored))
        # The dtype only tells the writer that the shape counts values, not bytes.
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(encode(tensor.value(), stored_type(tuple(tensor.weight.shape), plan.weights)))
    writer.close()


def add_special_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, plan: GGUFPlan) -> None:
    """Write the ids of special tokens, whether a prompt starts with BOS, and the chat template."""
    for name in SPECIAL_TOKENS:
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(plan.add_bos)
    writer.add_add_eos_token(False)
    if plan.chat_template:
        writer.add_chat_template(plan.chat_template)


def stored_type(shape: tuple[int, ...], weights: GGUFType) -> GGMLQuantizationType:
    """Return the type of one tensor: vectors stay in fp32, and matrices that do not divide into blocks are fp16."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[weights.upper()]
    block, _ = GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else GGMLQuantizationType.F16


def encode(value: Tensor, stored: GGMLQuantizationType) -> NDArray[np.generic]:
    """Return the bytes of a tensor in the type of the file; fp16 saturates instead of overflowing."""
    from gguf import GGMLQuantizationType, quants

    if stored == GGMLQuantizationType.F16:
        largest = torch.finfo(torch.float16).max
        value = value.clamp(-largest, largest)
    return quants.quantize(value.contiguous().numpy(), stored)
