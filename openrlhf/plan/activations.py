"""Memory of forward and backward passes: activations, head chunks and gradients, at their peak in a step.

The bytes per token are those of tensors that autograd saves in Transformers' decoder layers. For a layer with hidden
size h, MLP size f, and queries and keys of q and k numbers, in bf16:

    plain       2 norms x (4h fp32 input + 2h normalised + 2h output) + 2 (q + 2k + q) + 4 x 2f
    compiled    2 norms x (2h input + 2h output)                      + 2 (q + 2k + q) + 3 x 2f
    LoRA        2 norms x 4h + 4 (5h + q + f) fp32 inputs of adapters + 2 (q + 2k + q) + 3 x 2f
    LoRA, compiled   2 norms x (2h input + 2h output)                 + 2 (q + 2k + q) + 2 x 2f

Tensor parallelism divides f, q and k.

They agree with the peaks in docs/scale.md. The last line was chosen to match a single run. The figures for mixtures of
experts, and for LoRA without compiled layers, have not been measured.
"""

from __future__ import annotations

from openrlhf.models.chunks import CHUNK
from openrlhf.plan.states import FP32, ModelPlace, bucket_terms, gathered_terms, gradient_bytes
from openrlhf.plan.terms import Term, total

# Bytes per logit of a chunk in addition to the logits themselves: an fp32 softmax, and more if the head must be called.
PLAIN_HEAD, CALLED_HEAD, ENTROPY_HEAD, DISTILLING_HEAD = 4, 8, 14, 22


def saved_per_token(place: ModelPlace) -> float:
    """Return the bytes that autograd saves per token in one decoder layer."""
    shape, width = place.shape, place.width
    hidden, mlp = shape.hidden, shape.mlp / place.peers
    attention = width * (2 * shape.queries + 2 * shape.keys) / place.peers
    routed = 2 * width * hidden * shape.routed  # inputs and outputs of experts, copied for each
    compiled = 4 * width * hidden + attention + routed
    if place.adapted and place.local and place.work.sharding.deepcompile:
        return compiled + 2 * width * mlp
    if place.adapted and place.local:
        adapters = FP32 * (5 * hidden + shape.queries / place.peers + mlp)
        return 2 * FP32 * hidden + adapters + attention + 3 * width * mlp + routed
    if place.adapted:
        return 2 * (FP32 + width) * hidden + attention + 4 * width * mlp + routed
    if place.work.sharding.deepcompile:
        return compiled + 3 * width * mlp
    return 2 * (FP32 + 2 * width) * hidden + attention + 4 * width * mlp + routed


def tokens_per_device(place: ModelPlace, tokens: int) -> float:
    """Return the tokens of a micro-batch that one process computes; the processes of a ring share a micro-batch."""
    return tokens / place.work.sharding.ring_attn_size


def head_bytes(place: ModelPlace, tokens: float, *, training: bool) -> float:
    """Return the memory of the head: a chunk of logits, the inputs and, if it is trained, the gradient."""
    if place.model.scalar:
        return 0.0
    per_logit = PLAIN_HEAD
    if place.stage == 3 and not place.fsdp:
        per_logit = CALLED_HEAD
    if training and place.work.logs_entropy:
        per_logit = ENTROPY_HEAD
    if training and place.work.distils:
        per_logit = DISTILLING_HEAD
    chunk = min(CHUNK, tokens) * place.shape.vocabulary * (place.width + per_logit)
    inputs = 2 * place.width * place.shape.hidden * tokens
    trains_head = training and not place.adapted
    return chunk + inputs + (place.width * place.shape.head if trains_head else 0.0)


def forward_terms(place: ModelPlace) -> list[Term]:
    """Return the memory of a pass without gradients: one layer at a time."""
    tokens = tokens_per_device(place, place.work.score_tokens)
    shape, width = place.shape, place.width
    inside = width * (2 * shape.queries + 2 * shape.keys) + 3 * width * shape.mlp
    layer = (FP32 + 4 * width) * shape.hidden + inside / place.peers
    return [
        place.term("activations", tokens * layer, certain=False),
        place.term("head chunks", head_bytes(place, tokens, training=False), certain=False),
        *gathered_terms(place),
    ]


def training_terms(place: ModelPlace) -> list[Term]:
    """Return the peak memory of forward and backward passes together with the gradients.

    In one process, gradients are freed after each step, so those of a single micro-batch grow while activations shrink:
    the peak is at the start of the backward pass or at its end. DeepSpeed keeps them allocated.
    """
    work, tokens = place.work, tokens_per_device(place, place.work.train_tokens)
    layer = tokens * saved_per_token(place)
    gradients = 0.0 if work.sharding.adam_offload and not place.on_cpu else gradient_bytes(place)
    head = head_bytes(place, tokens, training=True)
    if work.sharding.gradient_checkpointing:  # the input of each layer, and everything of the one that is recomputed
        saved = place.shape.layers * tokens * place.width * place.shape.hidden
        start = [saved + layer, 0.0] if layer > head else [saved, head]
    else:
        last_norm = tokens * 2 * FP32 * place.shape.hidden
        start = [place.shape.layers * layer + last_norm, head]
    kept = place.deepspeed or work.micro_batches > 1
    at_start = [
        place.term("gradients", gradients if kept else 0.0),
        place.term("activations", start[0], certain=False),
        place.term("head chunks", start[1], certain=False),
    ]
    at_end = [place.term("gradients", gradients), place.term("activations", layer, certain=False)]
    return [*max(at_start, at_end, key=total), *gathered_terms(place), *bucket_terms(place)]
