"""FLOPs of a training step, counted from sizes alone, as in PaLM (Chowdhery et al. 2022, appendix B).

A weight matrix costs 2 FLOPs per parameter and token in the forward pass. The backward pass costs 2 more for the
gradient of the input and 2 more for the gradient of the weights, which frozen matrices under LoRA do not need. In
causal attention over s tokens, a query meets s / 2 keys on average. The vocabulary head counts for target tokens only.
Embeddings are looked up, so they do not count; nor do recomputed activations and padding, which are not useful work. A
prompt that several samples share counts once if it is computed once.

Runs report their utilization with these counts (`training/utilization.py`), and plans predict seconds with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from openrlhf.models.forward import Network
from openrlhf.types import Batch


@dataclass(frozen=True)
class MatrixSizes:
    """Sizes of a network that determine its FLOPs: the parameters of its matrices, and the width of its attention."""

    trained: float  # parameters of trained matrices, without the vocabulary head
    frozen: float  # parameters of frozen matrices, such as the base weights under LoRA
    trained_head: float  # parameters of the vocabulary head, if it is trained
    frozen_head: float
    attention: float  # layers x heads x head size

    @classmethod
    def of(cls, network: Network) -> MatrixSizes:
        """Count the parameters; in a mixture of experts, count only the experts that a token is routed to."""
        decoder, config = network.decoder, network.decoder.config.get_text_config()
        embedding = getattr(decoder.get_input_embeddings(), "weight", None)
        head = getattr(decoder.get_output_embeddings(), "weight", None)  # None for a scalar head
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        active = (getattr(config, "num_experts_per_tok", None) or experts) / experts
        sizes = dict.fromkeys(("trained", "frozen", "trained_head", "frozen_head"), 0.0)
        for name, parameter in network.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 keeps only a shard
            if len(shape) < 2 or (parameter is embedding and parameter is not head):
                continue
            count = float(shape.numel()) * (2 if parameter.dtype == torch.uint8 else 1)  # two 4-bit weights per byte
            count *= active if ".experts." in name else 1.0
            sizes[("trained" if parameter.requires_grad else "frozen") + ("_head" if parameter is head else "")] += (
                count
            )
        heads = getattr(config, "num_attention_heads", None) or 0  # None without attention
        head_size = getattr(config, "head_dim", None) or config.hidden_size / max(heads, 1)
        return cls(**sizes, attention=config.num_hidden_layers * heads * head_size)


class StepSize(NamedTuple):
    """Counts that determine the FLOPs of a step."""

    tokens: float
    pairs: float  # pairs of a query and a key: s^2 / 2 for a sequence of s tokens
    targets: float

    @classmethod
    def of(cls, network: Network, batch: Batch) -> StepSize:
        """Count what a network computes for a batch, without padding."""
        positions = batch.position_ids[batch.sequence_ids >= 0]  # [tokens]
        prefixes = network.prefixes_of(batch)
        if prefixes is not None:
            positions = positions[prefixes.kept.long()]  # [tokens of the row]
        return cls(len(positions), float((positions + 0.5).sum()), float(batch.target_mask.sum()))


def step_flops(sizes: MatrixSizes, step: StepSize) -> float:
    """Return the FLOPs of the forward and backward pass of a step."""
    matrices = (6 * sizes.trained + 4 * sizes.frozen) * step.tokens
    head = (6 * sizes.trained_head + 4 * sizes.frozen_head) * step.targets
    # Per layer and pair: two products (queries x keys, weights x values) of 2 FLOPs, in three passes.
    attention = 12 * sizes.attention * step.pairs
    return matrices + head + attention
