"""Log-probs, entropies and distillation terms straight from hidden states, a chunk of tokens at a time.

The projection to the vocabulary is recomputed in the backward pass, so neither pass holds [tokens, vocabulary]: only
[chunk, vocabulary]. The head is a callable that the caller hands in: under ZeRO-3 or tensor parallelism it is the
module that gathers or reduces, under LoRA the one with its adapter. Log-probs through a plain linear head, the most
common case, have a backward pass written by hand: less memory and less time than autograd's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from openrlhf.algo.reduce import LOWEST_LOG_PROB
from openrlhf.algo.token_loss import kd_terms
from openrlhf.models.heads import VocabularyHead

Temperature = float | Tensor  # one for all tokens, or [tokens]
Head = Callable[[Tensor], Tensor]  # [tokens, hidden] -> [tokens, vocabulary]
ChunkFunction = Callable[..., tuple[Tensor, ...]]

CHUNK = 1024  # tokens; at a vocabulary of 150k a chunk of fp32 logits is 0.6 GB


def in_chunks(function: ChunkFunction, *per_token: Tensor, chunk: int = CHUNK) -> tuple[Tensor, ...]:
    """`function` over slices of its arguments, its results joined; recomputed for the backward pass."""
    pieces = zip(*(tensor.split(chunk) for tensor in per_token), strict=True)
    if torch.is_grad_enabled():
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        results = [function(*piece) for piece in pieces]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def token_log_probs(
    hidden: Tensor, targets: Tensor, head: Head, *, temperature: Temperature = 1.0, chunk: int = CHUNK
) -> Tensor:
    """log p(target) at each of [tokens, hidden]; fp32 whatever the model's dtype."""
    linear = plain_linear(head)
    if linear is not None:
        weight, factor = linear
        return LinearLogProbs.apply(hidden, weight, targets, temperature / factor, chunk)

    def part(hidden: Tensor, targets: Tensor, *own: Tensor) -> tuple[Tensor]:
        logits = scaled_logits(head, hidden, *own or (temperature,))
        return (logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1),)

    return in_chunks(part, hidden, targets, *per_token(temperature), chunk=chunk)[0]


def token_log_probs_and_entropy(
    hidden: Tensor, targets: Tensor, head: Head, *, temperature: Temperature = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same with the entropy of each distribution, both at the sampling temperature."""

    def part(hidden: Tensor, targets: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = scaled_logits(head, hidden, *own or (temperature,)).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs.clamp(min=LOWEST_LOG_PROB)).sum(-1)  # 0 x -inf would be NaN
        return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy

    log_probs, entropy = in_chunks(part, hidden, targets, *per_token(temperature), chunk=chunk)
    return log_probs, entropy


def distillation_terms(
    hidden: Tensor, teacher_hidden: Tensor, targets: Tensor, head: Head, teacher_head: Head, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """(log p(target), sum over the vocabulary of p_teacher x log p_student), each [tokens]."""

    def part(hidden: Tensor, teacher_hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_hidden)
        return kd_terms(head(hidden), teacher_logits, targets)

    log_probs, cross = in_chunks(part, hidden, teacher_hidden, targets, chunk=chunk)
    return log_probs, cross


def per_token(temperature: Temperature) -> tuple[Tensor, ...]:
    """What goes through the chunks beside hidden states and targets: each token's temperature, if they differ."""
    return (temperature,) if isinstance(temperature, Tensor) else ()


def scaled_logits(head: Head, hidden: Tensor, temperature: Temperature) -> Tensor:
    return divided(head(hidden).float(), temperature)


def divided(logits: Tensor, temperature: Temperature) -> Tensor:
    """[tokens, vocabulary] in fp32; as they are if the temperature is 1, since the softmax reads any dtype as fp32."""
    if isinstance(temperature, Tensor):
        return logits.float() / temperature[:, None]
    return logits if temperature == 1.0 else logits.float() / temperature


def plain_linear(head: Head) -> tuple[Tensor, float] | None:
    """(weight, factor) of a head that is factor x a matrix product; None if only a call of it will do.

    ZeRO-3 marks its parameters with `ds_id`: those are whole only as long as their owner holds them.
    """
    module: Any = head
    factor: float | None = 1.0
    if isinstance(head, VocabularyHead):
        module, factor = head.module, head.factor
    is_plain = type(module) is nn.Linear and module.bias is None and not hasattr(module.weight, "ds_id")
    return (module.weight, factor) if is_plain and factor else None


class LinearLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight^T / temperature) at the targets; d/dlogits = (one-hot - softmax) / temperature."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Temperature, chunk: int
    ) -> Tensor:
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        for place in range(0, len(targets), chunk):
            part = slice(place, place + chunk)
            logits = divided(hidden[part] @ weight.T, sliced(temperature, part))
            log_probs[part] = logits.log_softmax(-1, dtype=torch.float32).gather(-1, targets[part, None]).squeeze(-1)
        ctx.save_for_backward(hidden, weight, targets, log_probs)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Only the softmax passes over [chunk, vocabulary]: a token's factor goes onto its hidden state instead."""
        hidden, weight, targets, log_probs = ctx.saved_tensors
        to_hidden, to_weight = (
            torch.zeros_like(tensor) if wanted else None
            for tensor, wanted in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        factor = (-gradient / ctx.temperature)[:, None]
        at_target = torch.expm1(log_probs)[:, None].to(weight.dtype)  # p - 1, exact where p is nearly 1
        for place in range(0, len(targets), ctx.chunk):
            part = slice(place, place + ctx.chunk)
            logits = divided(hidden[part] @ weight.T, sliced(ctx.temperature, part))
            off = logits.softmax(-1).to(weight.dtype).scatter_(-1, targets[part, None], at_target[part])
            if to_hidden is not None:
                to_hidden[part] = (off @ weight) * factor[part]
            if to_weight is not None:
                to_weight.addmm_(off.T, (hidden[part] * factor[part]).to(hidden.dtype))
        return to_hidden, to_weight, None, None, None


def sliced(temperature: Temperature, part: slice) -> Temperature:
    return temperature[part] if isinstance(temperature, Tensor) else temperature
