"""Model FLOPs utilization (MFU): the share of the device's peak that the forward and backward passes of a step reach.

FLOPs are counted as in PaLM (Chowdhery et al. 2022, appendix B), from sizes alone. A weight matrix costs 2 FLOPs per
parameter and token in the forward pass, as much again for the gradient of its input, and as much again for its own
gradient, which frozen matrices under LoRA do not need. Causal attention over s tokens multiplies queries with s / 2
keys and values on average. The head counts only for target tokens, and embeddings, which are looked up, do not count.
Recomputed activations and padding do not count either: they take time and are not useful. A prompt that several samples
share counts once if it is computed once.

`TrainBackend` counts each step. The peak is the dense bf16 figure in the maker's data sheet, which no program reaches:
large matrix products on an H200 come to 80% of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from openrlhf.models.forward import Network
from openrlhf.types import Batch

PEAK_TERAFLOPS = {  # dense bf16 matrix products, by a word of the device's name
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "A40": 150.0,
    "4090": 165.0,
    "3090": 71.0,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None if it is not known."""
    words = re.split(r"[ \-]", device_name)
    if "H100" in words and "PCIe" in words:  # the slower of the two H100s
        return 756e12
    return next((1e12 * peak for word, peak in PEAK_TERAFLOPS.items() if word in words), None)


@dataclass(frozen=True)
class MatrixSizes:
    """Sizes of a network that determine its FLOPs: parameters that each token is multiplied with, and attention."""

    trained: float  # parameters of trained matrices, without the vocabulary head
    frozen: float  # those of frozen matrices, such as the ones that adapters are added to
    trained_head: float  # parameters of the vocabulary head, if it is trained
    frozen_head: float
    attention: float  # layers x heads x head size

    @classmethod
    def of(cls, network: Network) -> MatrixSizes:
        """Count the parameters; of a mixture of experts, only as many experts as a token is routed to."""
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
            count = float(shape.numel()) * (2 if parameter.dtype == torch.uint8 else 1)  # 4-bit weights: two in a byte
            count *= active if ".experts." in name else 1.0
            sizes[("trained" if parameter.requires_grad else "frozen") + ("_head" if parameter is head else "")] += (
                count
            )
        heads = getattr(config, "num_attention_heads", None) or 0  # None without attention
        head_size = getattr(config, "head_dim", None) or config.hidden_size / max(heads, 1)
        return cls(**sizes, attention=config.num_hidden_layers * heads * head_size)


class StepSize(NamedTuple):
    """What the FLOPs of a step are proportional to."""

    tokens: float
    pairs: float  # of a query and a key: s^2 / 2 for a sequence of s tokens
    targets: float

    @classmethod
    def of(cls, network: Network, batch: Batch) -> StepSize:
        """Count what a network computes for a batch, without padding."""
        positions = batch.position_ids[batch.sequence_ids >= 0]  # [tokens]
        prefixes = network.prefixes_of(batch)
        if prefixes is not None:
            positions = positions[prefixes.kept]  # [tokens of the row]
        return cls(len(positions), float((positions + 0.5).sum()), float(batch.target_mask.sum()))


def step_flops(sizes: MatrixSizes, step: StepSize) -> float:
    """Return the FLOPs of the forward and backward pass of a step."""
    matrices = (6 * sizes.trained + 4 * sizes.frozen) * step.tokens
    head = (6 * sizes.trained_head + 4 * sizes.frozen_head) * step.targets
    # Per layer and pair: two products (queries x keys, weights x values) of 2 FLOPs, in three passes.
    attention = 12 * sizes.attention * step.pairs
    return matrices + head + attention


class UtilizationMeter:
    """Counts the FLOPs and seconds of one optimizer step in one process."""

    def __init__(self, network: Network, device: torch.device) -> None:
        half = network.dtype in (torch.bfloat16, torch.float16)  # the peak is that of half precision
        name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
        self.network = network
        self.peak = peak_flops(name)
        self.sizes = MatrixSizes.of(network) if self.peak else None
        self.began, self.flops = 0.0, 0.0

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Start the clock of a step; the micro-batches are still in host memory."""
        if self.sizes is None:
            return
        steps = [StepSize.of(self.network, batch) for batch in micro_batches if not batch.filler]
        self.flops = sum(step_flops(self.sizes, step) for step in steps)
        self.began = time.perf_counter()

    def read(self, processes: int = 1) -> dict[str, float]:
        """Return `mfu` for the logs, right after the update; empty if the peak is not known.

        `processes` share the work on the micro-batches, in a ring or by tensor parallelism.
        """
        if self.peak is None:
            return {}
        return {"mfu": self.flops / processes / (time.perf_counter() - self.began) / self.peak}
