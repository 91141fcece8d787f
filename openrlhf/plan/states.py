"""Weights, gradients and optimizer states of a model in one process, for each way in which the project trains.

`training/local.py` trains in one process, and `training/deepspeed.py` in several; see there for what they allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.workload import WorkGroup, Workload, WorkModel
from openrlhf.plan.shapes import ModelShape
from openrlhf.plan.terms import (
    BUCKETS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    MOMENTS,
    OFFLOADED,
    WEIGHTS,
    Term,
)

FP32, MOMENT_BYTES = 4, 8
NF4 = 0.516  # bytes per weight: 4 bits, and the constants of double quantisation
REDUCE_BUCKET = 5e8  # elements: DeepSpeed's reduce_bucket_size
LIVE_PARAMETERS = 1e9  # elements that ZeRO-3 keeps gathered at a time: its stage3_max_live_parameters


@dataclass(frozen=True)
class ModelPlace:
    """A model in the processes of its group, with its shape and dtype."""

    work: Workload
    group: WorkGroup
    model: WorkModel
    shape: ModelShape
    on_cpu: bool = False

    @property
    def deepspeed(self) -> bool:
        return self.group.devices > 1 or self.work.always_deepspeed

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 in one process."""
        return self.work.zero_stage if self.deepspeed else 0

    @property
    def ranks(self) -> int:
        """Processes among which ZeRO divides."""
        return max(1, self.group.devices // self.work.tensor_parallel)

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return FP32 if self.on_cpu or self.work.loading.param_dtype == "fp32" else 2

    @property
    def parameters(self) -> float:
        """Parameters in one process before ZeRO divides them; tensor parallelism splits all but the vocabulary."""
        outside = max(self.shape.embedding, self.shape.head)
        return outside + (self.shape.parameters - outside) / self.work.tensor_parallel

    @property
    def trained(self) -> float:
        """Trained parameters: all, or those of the adapters and a scalar head."""
        lora = self.work.lora
        if not self.model.trained:
            return 0.0
        if not lora.lora_rank:
            return self.parameters
        chosen = lora.target_modules
        every = chosen == ("all-linear",)
        width = sum(size for name, size in self.shape.adapters.items() if every or name in chosen)
        return lora.lora_rank * width / self.work.tensor_parallel + self.shape.hidden * self.model.scalar

    @property
    def adapted(self) -> bool:
        return self.model.trained and self.work.lora.lora_rank > 0

    @property
    def weights(self) -> float:
        """Bytes of all weights in one process before ZeRO divides them."""
        added = 0.0
        if self.adapted:  # adapters are fp32 in one process, and of the model's dtype in DeepSpeed
            added = self.trained * (self.width if self.deepspeed else FP32)
        if not self.work.loading.load_in_4bit:
            return self.width * self.parameters + added
        rest = FP32 if self.adapted else self.width  # PEFT widens what is not quantised
        return NF4 * self.shape.linear + rest * (self.parameters - self.shape.linear) + added

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO-3 divides the weights."""
        return self.stage == 3 and not self.work.loading.load_in_4bit

    def term(self, kind: str, size: float, *, certain: bool = True) -> Term:
        return Term(self.model.role, kind, size, certain)


def weight_terms(place: ModelPlace) -> list[Term]:
    """Return the weights on the device and, under ZeRO-3, those that are gathered for the current layers."""
    if not place.is_sharded:
        return [place.term(WEIGHTS, place.weights)]
    head = place.width * place.shape.head  # stays gathered
    live = place.width * min(place.parameters, max(LIVE_PARAMETERS, place.shape.layer / place.work.tensor_parallel))
    secondary = place.weights / place.work.secondary_shards if place.work.secondary_shards > 1 else 0.0
    return [
        place.term(WEIGHTS, place.weights / place.ranks + secondary),
        place.term(GATHERED, live + head, certain=False),
    ]


def optimizer_terms(place: ModelPlace) -> list[Term]:
    """Return fp32 masters and Adam's moments of a trained model, wherever they are."""
    shards = place.ranks if place.stage >= 1 else 1
    masters = FP32 * place.trained / shards
    is_own_master = place.width == FP32 or (place.adapted and not place.deepspeed)
    if is_own_master and not place.deepspeed and not place.work.adam_offload:
        masters = 0.0
    moments = MOMENT_BYTES * place.trained / shards
    if place.work.muon:  # one momentum for matrices, Adam for the vocabulary
        vocabulary = 0.0 if place.adapted else max(place.shape.embedding, place.shape.head)
        moments = FP32 * (place.trained - vocabulary) + MOMENT_BYTES * vocabulary
    return [place.term(MASTERS, masters), place.term(MOMENTS, moments)]


def gradient_bytes(place: ModelPlace) -> float:
    """Return the fp32 gradients that accumulate over the micro-batches of a step."""
    if place.stage >= 2:
        return FP32 * place.trained / place.ranks
    without_zero = place.deepspeed and place.stage == 0 and place.width < FP32
    return (FP32 + (place.width if without_zero else 0)) * place.trained  # DeepSpeed then also keeps the model's own


def bucket_terms(place: ModelPlace) -> list[Term]:
    """Return the buffers in which DeepSpeed reduces gradients."""
    if place.stage == 0:
        return []
    return [place.term(BUCKETS, place.width * min(REDUCE_BUCKET, place.trained), certain=False)]


def resting_terms(place: ModelPlace) -> tuple[list[Term], list[Term]]:
    """Return what a model holds between steps, on the device and in host memory."""
    if not place.model.trained:
        if not place.model.offloaded or place.on_cpu:
            return weight_terms(place), []
        head = place.width * place.shape.head / (place.ranks if place.is_sharded else 1)
        weights = place.weights / (place.ranks if place.is_sharded else 1)
        return [place.term(WEIGHTS, head)], [place.term(OFFLOADED, weights - head)]
    optimizer = optimizer_terms(place)
    if not place.work.adam_offload or place.on_cpu:
        return [*weight_terms(place), *optimizer], []
    gradients = place.term(GRADIENTS, gradient_bytes(place))
    return weight_terms(place), [*optimizer, gradients]
