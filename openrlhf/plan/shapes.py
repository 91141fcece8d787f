"""The sizes of a model, from its config.json alone: the model is built on the meta device, which holds no weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from openrlhf.config.sections.model import LoadingFlags
from openrlhf.errors import ConfigError
from openrlhf.models.agreement import FAILURES
from openrlhf.models.experts import expert_modules
from openrlhf.models.forward import Network
from openrlhf.models.load import read_config
from openrlhf.models.source import cannot_load
from openrlhf.plan.flops import MatrixSizes

ROUTERS = ("gate", "router")  # names of the modules that choose experts
UNADAPTED = ("gpt_oss",)  # families whose experts and routers get no adapters from PEFT


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; counts of parameters include tied ones once."""

    parameters: float
    embedding: float  # parameters of the input embedding, which may be those of the head
    head: float  # parameters of the vocabulary head; 0 for a scalar head
    linear: float  # parameters that --load_in_4bit quantises: all linear layers except the head and joined experts
    largest: float  # parameters of the largest tensor
    layer: float  # parameters of the largest decoder layer
    experts: float  # parameters of that layer's experts
    adapters: Mapping[str, float]  # parameters of LoRA adapters per rank, by the name of the linear layer
    matrices: MatrixSizes  # parameters that a token is multiplied with, as if everything were trained
    vocabulary: int
    layers: int
    hidden: int
    queries: int  # heads x size of a head
    keys: int  # key heads x size of a head
    mlp: float  # hidden units of the MLPs that a token passes in a layer
    routed: int  # experts that a token is routed to; 0 without experts
    cached: int  # numbers that a KV cache stores per token and layer
    growing: int  # layers whose KV cache grows with the whole sequence, unlike sliding windows and linear attention
    rounding: float  # total size with each tensor rounded up to a power of two, relative to the exact size

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with: all matrices, and as many experts as it is routed to."""
        sizes = self.matrices
        return sizes.trained + sizes.frozen + sizes.trained_head + sizes.frozen_head


def read_shape(name: str, loading: LoadingFlags, *, scalar: bool = False) -> ModelShape:
    """Read the shape of a model in a folder or on a hub; `scalar` replaces its vocabulary head by a scalar one."""
    settings = read_config(name, loading)
    if getattr(settings, "quantization_config", None) and not loading.load_in_4bit:
        raise ConfigError(f"{name} is stored in quantised form, whose size in memory a plan does not know")
    try:
        return shape_of(settings, scalar=scalar, trust_remote_code=loading.trust_remote_code)
    except FAILURES as error:  # no common class: each model builds itself from unchecked numbers
        raise cannot_load("model", name, error) from None


def shape_of(settings: PretrainedConfig, *, scalar: bool = False, trust_remote_code: bool = False) -> ModelShape:
    """Return the shape of the model that this config describes."""
    kind = AutoModelForCausalLM
    if scalar:
        kind, settings = AutoModelForSequenceClassification, deepcopy(settings)
        settings.num_labels = 1
    with torch.random.fork_rng(devices=()), torch.device("meta"):  # building a model may draw random numbers
        # config.json may name another implementation of attention, even one that Transformers downloads.
        options = {"trust_remote_code": trust_remote_code, "attn_implementation": "eager"}
        model: PreTrainedModel = kind.from_config(settings, **options)
    text: Any = settings.get_text_config()  # fields differ between families
    embedding, head = (
        getattr(module, "weight", None) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    heads = getattr(text, "num_attention_heads", None) or 0
    head_size = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    queries, keys = heads * head_size, (getattr(text, "num_key_value_heads", None) or heads) * head_size
    cached = 2 * keys
    if getattr(text, "kv_lora_rank", None):  # DeepSeek's attention caches a small latent vector and expands it
        queries = keys = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        cached = text.kv_lora_rank + text.qk_rope_head_dim
    kinds = getattr(text, "layer_types", None)
    growing = sum(kind == "full_attention" for kind in kinds) if kinds else text.num_hidden_layers
    mlp, routed = mlp_width(text)
    weights = [parameter.numel() for parameter in model.parameters()]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    experts = [
        sum(p.numel() for held in expert_modules(layer) for p in held.parameters()) for layer in decoder_layers(model)
    ]
    adapters: dict[str, float] = {}
    for matrix in linear_layers(model, head):
        if text.model_type in UNADAPTED and (matrix.joined or matrix.name in ROUTERS):
            continue
        adapters[matrix.name] = adapters.get(matrix.name, 0) + matrix.count * (matrix.rows + matrix.columns)
    return ModelShape(
        parameters=sum(weights),
        embedding=0 if embedding is None else embedding.numel(),
        head=0 if head is None else head.numel(),
        linear=sum(matrix.rows * matrix.columns for matrix in linear_layers(model, head) if not matrix.joined),
        largest=max(weights),
        layer=max(layers, default=sum(weights)),
        experts=max(experts, default=0),
        adapters=adapters,
        matrices=MatrixSizes.of(Network(model, self_test=False)),
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=queries,
        keys=keys,
        mlp=mlp,
        routed=routed,
        cached=cached,
        growing=growing,
        rounding=sum(1 << (count - 1).bit_length() for count in weights) / sum(weights),
    )


def mlp_width(text: Any) -> tuple[float, int]:
    """Return the hidden units of the MLPs that a token passes in a layer, and the experts it is routed to."""
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    routed = getattr(text, "num_experts_per_tok", None) or 0
    if experts == 1 or not routed:
        return dense, 0
    width = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared += (getattr(text, "n_shared_experts", None) or 0) * width
    return routed * width + shared, routed


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    return [layer for stack in stacks for layer in stack]


class Matrix(NamedTuple):
    """A linear layer, or the matrices of all experts in one tensor."""

    name: str  # last part of the name of its module or, for joined experts, of the tensor
    count: int
    rows: int
    columns: int
    joined: bool = False


def linear_layers(model: PreTrainedModel, head: torch.Tensor | None) -> list[Matrix]:
    """Return the matrices that get adapters: all linear layers except the head, plus routers and experts."""
    found: list[Matrix] = []
    for name, parameter in model.named_parameters():
        *_, owner, own = ("", *name.split("."))
        module = model.get_submodule(name.rpartition(".")[0])
        is_linear = isinstance(module, nn.Linear | Conv1D) or owner in ROUTERS
        if is_linear and parameter.ndim == 2 and parameter is not head:
            rows, columns = parameter.shape
            found.append(Matrix(owner, 1, rows, columns))
        elif parameter.ndim == 3 and ".experts" in name:
            count, rows, columns = parameter.shape
            count *= 2 if own == "gate_up_proj" else 1  # PEFT doubles the rank for two matrices in one tensor
            found.append(Matrix(own, count, rows, columns, joined=True))
    return found
