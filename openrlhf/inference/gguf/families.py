"""The model families that can be written as GGUF: their hyperparameters and their tensors in the names of llama.cpp.

Each family is one row of `FAMILIES`. Names of tensors come from the table of the `gguf` package; the rows add two facts
that the names do not contain: whether the rotary dimensions of queries and keys are interleaved, and the number added
to norm weights. A family that is not in the table is rejected, because a wrong file would load and then generate
nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from openrlhf.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter

CONVERTER = "convert_hf_to_gguf.py of llama.cpp, which supports more models"
OUTPUT_HEAD = "lm_head.weight"
LAYERS_OF_27B = (46, 62)  # numbers of layers of Gemma 2 and 3 (27B), for which llama.cpp uses another attention scale


@dataclass(frozen=True)
class Family:
    """How a model type of Transformers maps to an architecture of llama.cpp."""

    architecture: str
    interleaved: bool = False  # rotary pairs are neighbours, as in Meta's Llama; Transformers keeps halves
    norm_offset: float = 0.0  # added to the weights of norms; Gemma's own forward adds it instead
    capped: bool = False  # logits and attention scores pass through a tanh
    sliding: bool = False  # the architecture alternates sliding and full attention


class Rope(TypedDict, total=False):
    """The parameters of rotary embeddings in config.json that are read here."""

    rope_type: str
    rope_theta: float
    factor: float
    original_max_position_embeddings: int


FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", norm_offset=1.0, capped=True, sliding=True),
    "gemma3_text": Family("gemma3", norm_offset=1.0, sliding=True),
}


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model; raise if it is unknown or uses a feature that the file could not express."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"--gguf cannot write models of the family {config.model_type}: expected one of {known}", try_this=CONVERTER
        )
    kind = rope_of(config).get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise ConfigError(f"--gguf cannot write rotary embeddings of type {kind}", try_this=CONVERTER)
    scale = getattr(config, "query_pre_attn_scalar", head_dim_of(config))
    if scale != head_dim_of(config) and config.num_hidden_layers not in LAYERS_OF_27B:
        raise ConfigError(f"--gguf cannot write attention that is scaled by 1/sqrt({scale})", try_this=CONVERTER)
    return family


def rope_of(config: PretrainedConfig) -> Rope:
    """Return the parameters of rotary embeddings; those of full attention if layers differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention", parameters)


def head_dim_of(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_hyperparameters(writer: GGUFWriter, config: PretrainedConfig, family: Family) -> None:
    """Write the sizes of the model under llama.cpp's keys."""
    head_dim, rope = head_dim_of(config), rope_of(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    add_rope_scaling(writer, rope)
    if family.capped:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family.sliding:
        writer.add_sliding_window(config.sliding_window)


def add_rope_scaling(writer: GGUFWriter, rope: Rope) -> None:
    """Write the scaling of rotary embeddings. Llama 3's is a tensor of factors instead (`rope_factors`)."""
    from gguf import RopeScalingType

    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: its name, and the weight that it is converted from."""

    name: str
    weight: Tensor
    heads: int | None = None  # number of query or key heads to interleave
    offset: float = 0.0

    def value(self) -> Tensor:
        """Return the tensor as llama.cpp expects it, in fp32."""
        value = self.weight.detach().float() + self.offset
        return value if self.heads is None else interleave(value, self.heads)


def file_tensors(model: PreTrainedModel, family: Family) -> Iterator[FileTensor]:
    """Yield the tensors of the file in the order of the model; their values are computed on demand."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = model.config
    architecture = next(item for item, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    factors = rope_factors(config)
    if factors is not None:
        yield FileTensor("rope_freqs.weight", factors)
    for name, weight in model.state_dict().items():
        if name == OUTPUT_HEAD and config.tie_word_embeddings:
            continue  # llama.cpp projects with the embeddings if there is no head
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise ConfigError(f"--gguf has no name for the tensor {name}", try_this=CONVERTER)
        heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
        turned = next((count for part, count in heads.items() if part in name), None) if family.interleaved else None
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        yield FileTensor(written, weight, turned, offset)


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from two halves to neighbouring pairs: (0, 1, 2, 3) becomes (0, 2, 1, 3).

    Rotary embeddings turn pairs of dimensions. Transformers pairs dimension i with i + head_dim / 2, and llama.cpp's
    Llama pairs 2i with 2i + 1.
    """
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # [heads, 2, head_dim / 2, ...]
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: PretrainedConfig) -> Tensor | None:
    """Return the factors by which Llama 3 lengthens the wavelength of each rotary pair; None for other models.

    Long wavelengths are stretched by `factor`, short ones are kept, and those between are interpolated.
    """
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [head_dim / 2]
    pairs = torch.arange(len(stretched)) / len(stretched)
    return rope["rope_theta"] ** -pairs / stretched
