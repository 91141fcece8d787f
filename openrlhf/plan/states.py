"""Weights, gradients and optimizer states of a model in one process, for each training backend.

The backends (`training/local.py`, `training/deepspeed.py`, `training/fsdp.py`) allocate them. Under FSDP, the shard of
a trained weight is its fp32 master, so there is no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.workload import WorkGroup, Workload, WorkModel
from openrlhf.plan.shapes import ModelShape
from openrlhf.plan.terms import Kind, Term

FP32, MOMENT_BYTES = 4, 8
NF4 = 0.516  # bytes per weight: 4 bits, and the constants of double quantisation
REDUCE_BUCKET = 5e8  # elements: DeepSpeed's reduce_bucket_size
GATHERED_LAYERS = 3  # held by FSDP at the same time: the current one, and two copies of the next (buffer and unpacked)
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
    def fsdp(self) -> bool:
        return self.work.fsdp

    @property
    def deepspeed(self) -> bool:
        return not self.fsdp and (self.group.devices > 1 or self.work.always_deepspeed)

    @property
    def local(self) -> bool:
        return not self.fsdp and not self.deepspeed

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 in one process, and 3 under FSDP, which divides the same states."""
        if self.fsdp:
            return 3
        return self.work.sharding.zero_stage if self.deepspeed else 0

    @property
    def split(self) -> int:
        """Tensor-parallel processes that divide the weights before ZeRO does; 1 under FSDP, which shards over all."""
        return 1 if self.fsdp else self.work.sharding.ds_tensor_parallel_size

    @property
    def peers(self) -> int:
        """Processes that divide each layer's matrices and inner activations; only trained models are divided."""
        return self.work.sharding.ds_tensor_parallel_size if self.model.trained else 1

    @property
    def ranks(self) -> int:
        """Number of processes that ZeRO or FSDP shards over."""
        return max(1, self.group.devices // self.split)

    @property
    def width(self) -> int:
        """Bytes per weight."""
        return FP32 if self.on_cpu or self.work.loading.param_dtype == "fp32" else 2

    @property
    def parameters(self) -> float:
        """Parameters in one process before ZeRO divides them; tensor parallelism splits all but the vocabulary."""
        outside = max(self.shape.embedding, self.shape.head)
        return outside + (self.shape.parameters - outside) / self.split

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
        return lora.lora_rank * width / self.split + self.shape.hidden * self.model.scalar

    @property
    def adapted(self) -> bool:
        return self.model.trained and self.work.lora.lora_rank > 0

    @property
    def weights(self) -> float:
        """Bytes of all weights in one process before ZeRO or FSDP divides them, without weights that are masters."""
        if self.fsdp:
            return self.width * self.parameters if self.adapted or not self.model.trained else 0.0
        added = 0.0
        if self.adapted:  # adapters are fp32 in one process, and of the model's dtype in DeepSpeed
            added = self.trained * (self.width if self.deepspeed else FP32)
        if not self.work.loading.load_in_4bit:
            return self.width * self.parameters + added
        rest = FP32 if self.adapted else self.width  # PEFT widens weights that are not quantised
        return NF4 * self.shape.linear + rest * (self.parameters - self.shape.linear) + added

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO-3 or FSDP divides the weights."""
        return self.stage == 3 and not self.work.loading.load_in_4bit

    def term(self, kind: Kind, size: float, *, certain: bool = True) -> Term:
        return Term(self.model.role, kind, size, certain)


def weight_terms(place: ModelPlace) -> list[Term]:
    """Return the weights on the device and, under ZeRO-3, those that are gathered for the current layers."""
    if place.fsdp:
        head = 0.0 if place.model.trained else place.width * place.shape.head * (1 - 1 / place.ranks)  # not divided
        return [place.term("weights", place.weights / place.ranks + head)]
    if not place.is_sharded:
        return [place.term("weights", place.weights)]
    head = place.width * place.shape.head  # stays gathered
    live = place.width * min(place.parameters, max(LIVE_PARAMETERS, place.shape.layer / place.split))
    secondary = place.weights / place.work.sharding.zpg if place.work.sharding.zpg > 1 else 0.0
    return [
        place.term("weights", place.weights / place.ranks + secondary),
        place.term("gathered layers", live + head, certain=False),
    ]


def optimizer_terms(place: ModelPlace) -> list[Term]:
    """Return fp32 masters and Adam's moments of a trained model, wherever they are."""
    shards = place.ranks if place.stage >= 1 else 1
    masters = FP32 * place.trained / shards
    is_own_master = place.local and (place.width == FP32 or place.adapted)
    if is_own_master and not place.work.sharding.adam_offload:
        masters = 0.0
    moments = MOMENT_BYTES * place.trained / shards
    if place.work.muon:  # one momentum for matrices, Adam for the vocabulary
        vocabulary = 0.0 if place.adapted else max(place.shape.embedding, place.shape.head)
        moments = FP32 * (place.trained - vocabulary) + MOMENT_BYTES * vocabulary
    return [place.term("fp32 masters", masters), place.term("optimizer states", moments)]


def gradient_bytes(place: ModelPlace) -> float:
    """Return the fp32 gradients that accumulate over the micro-batches of a step."""
    if place.stage >= 2:
        return FP32 * place.trained / place.ranks
    without_zero = place.deepspeed and place.stage == 0 and place.width < FP32
    return (FP32 + (place.width if without_zero else 0)) * place.trained  # DeepSpeed then also keeps the model's own


def gathered_terms(place: ModelPlace) -> list[Term]:
    """Return the weights that FSDP gathers for a pass: embeddings and head throughout, and a few layers at a time."""
    if not place.fsdp:
        return []
    layers = min(GATHERED_LAYERS, place.shape.layers) * layer_part(place)
    return [place.term("gathered layers", place.width * (outer_parameters(place) + layers), certain=False)]


def bucket_terms(place: ModelPlace) -> list[Term]:
    """Return the buffers in which DeepSpeed or FSDP reduces gradients."""
    if place.fsdp:  # gradients of a layer, or of embeddings and head, in the computing dtype and in fp32
        share = place.trained / place.parameters
        size = (place.width + FP32) * share * max(layer_part(place), outer_parameters(place))
        return [place.term("reduce buckets", size, certain=False)]
    if place.stage == 0:
        return []
    return [place.term("reduce buckets", place.width * min(REDUCE_BUCKET, place.trained), certain=False)]


def layer_part(place: ModelPlace) -> float:
    """Return the parameters of a layer that one process computes with."""
    shape = place.shape
    return (shape.layer - shape.experts) / place.peers + shape.experts / place.work.sharding.expert_parallel_size


def outer_parameters(place: ModelPlace) -> float:
    """Return the parameters outside of layers: embeddings, and a head that is not tied to them."""
    shape = place.shape
    return max(shape.embedding, shape.head, shape.parameters - shape.layers * shape.layer)


def resting_terms(place: ModelPlace) -> tuple[list[Term], list[Term]]:
    """Return a model's memory between steps, on the device and in host memory."""
    if not place.model.trained:
        if not place.model.offloaded or place.on_cpu:
            return weight_terms(place), []
        whole_head = place.width * place.shape.head
        head = whole_head / (place.ranks if place.is_sharded else 1)
        weights = place.weights / (place.ranks if place.is_sharded else 1)
        kept = whole_head if place.fsdp else head
        return [place.term("weights", kept)], [place.term("offloaded", weights - head)]
    optimizer = optimizer_terms(place)
    if not place.work.sharding.adam_offload or place.on_cpu:
        return [*weight_terms(place), *optimizer], []
    gradients = place.term("gradients", gradient_bytes(place))
    if place.fsdp:  # all shards are in host memory
        return [], [place.term("offloaded", place.weights / place.ranks), *optimizer, gradients]
    return weight_terms(place), [*optimizer, gradients]
