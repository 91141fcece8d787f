"""Log-probs, entropies and distillation terms from hidden states, computed one chunk of tokens at a time.

The projection to the vocabulary is recomputed in the backward pass, so both passes only need memory for
[chunk, vocabulary], not for [tokens, vocabulary]:

    [tokens, hidden]  --split-->  [chunk, hidden]  --head-->  [chunk, vocabulary]  -->  [chunk]  --cat-->  [tokens]

`Network` passes in the head as a callable, because under ZeRO-3, tensor parallelism or LoRA the module must be called
to gather its weights, reduce its output or apply its adapter. The backward pass of log-probs is written by hand, which
takes less memory and time than autograd: for a plain linear head, the most common case, including the head
(`LinearLogProbs`), and otherwise starting at the logits (`TargetLogProbs`). If a linear head is frozen, as it is under
LoRA, nothing has to be recomputed (`FrozenLinearLogProbs`). All three read the logits through `LogitPasses`, which can
be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from openrlhf.algo.reduce import LOWEST_LOG_PROB
from openrlhf.algo.token_loss import kd_terms
from openrlhf.models.heads import VocabularyHead

Temperature = float | Tensor  # one value for all tokens, or [tokens]
Head = Callable[[Tensor], Tensor]  # [tokens, hidden] -> [tokens, vocabulary]
AutogradContext: TypeAlias = Any  # the ctx of a torch.autograd.Function, which accepts any attribute
ChunkFunction = Callable[..., tuple[Tensor, ...]]

CHUNK = 1024  # tokens; with a vocabulary of 150k, a chunk of fp32 logits takes 0.6 GB


def divided(logits: Tensor, temperature: Temperature) -> Tensor:
    """Divide logits [tokens, vocabulary] by the temperature in fp32.

    If the temperature is 1, the logits are returned unchanged: the softmax converts them to fp32.
    """
    if isinstance(temperature, Tensor):
        return logits.float() / temperature[:, None]
    return logits if temperature == 1.0 else logits.float() / temperature


def target_log_probs(logits: Tensor, targets: Tensor, temperature: Temperature) -> Tensor:
    """Return log_softmax(logits / temperature) at the targets, [tokens], in fp32."""
    log_probs = divided(logits, temperature).log_softmax(-1, dtype=torch.float32)  # [tokens, vocabulary]
    return log_probs.gather(-1, targets[:, None]).squeeze(-1)


def minus_one_hot(logits: Tensor, targets: Tensor, log_probs: Tensor, temperature: Temperature) -> Tensor:
    """Return softmax(logits / temperature) - one-hot(targets) [tokens, vocabulary], the gradient of -log p(target).

    `log_probs` [tokens] are those of the targets: p - 1 is accurate as expm1 even if p is close to 1.
    """
    at_target = torch.expm1(log_probs)[:, None].to(logits.dtype)
    return divided(logits, temperature).softmax(-1).to(logits.dtype).scatter_(-1, targets[:, None], at_target)


@dataclass(frozen=True)
class LogitPasses:
    """The two functions that read all logits [tokens, vocabulary] of a chunk.

    PyTorch's own kernels write a copy of bf16 logits in fp32, and their log-softmax; compiled functions keep both in
    registers, which makes the log-probs of a large vocabulary several times faster.
    """

    log_probs: Callable[[Tensor, Tensor, Temperature], Tensor] = target_log_probs
    off: Callable[[Tensor, Tensor, Tensor, Temperature], Tensor] = minus_one_hot

    @classmethod
    def compiled(cls, backend: str) -> LogitPasses:
        """Compile both when they are first called, for any number of tokens."""
        return cls(
            torch.compile(target_log_probs, dynamic=True, backend=backend),
            torch.compile(minus_one_hot, dynamic=True, backend=backend),
        )


PLAIN = LogitPasses()


def in_chunks(function: ChunkFunction, *per_token: Tensor, chunk: int = CHUNK) -> tuple[Tensor, ...]:
    """Apply `function` to chunks of its arguments and concatenate the results; recompute them in the backward pass."""
    pieces = zip(*(tensor.split(chunk) for tensor in per_token), strict=True)
    if torch.is_grad_enabled():
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        results = [function(*piece) for piece in pieces]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: Temperature = 1.0,
    chunk: int = CHUNK,
    passes: LogitPasses = PLAIN,
) -> Tensor:
    """Return log p(target) [tokens] from hidden states [tokens, hidden], always in fp32.

    Temperatures per token are split into chunks like the other arguments.
    """
    linear = plain_linear(head)
    if linear is not None:
        weight, factor = linear
        frozen = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
        method = FrozenLinearLogProbs if frozen else LinearLogProbs
        return method.apply(hidden, weight, targets, temperature / factor, chunk, passes)

    def part(hidden: Tensor, targets: Tensor, own: Temperature = temperature) -> tuple[Tensor]:
        return (TargetLogProbs.apply(head(hidden), targets, own, passes),)

    temperatures = (temperature,) if isinstance(temperature, Tensor) else ()
    return in_chunks(part, hidden, targets, *temperatures, chunk=chunk)[0]


def token_log_probs_and_entropy(
    hidden: Tensor, targets: Tensor, head: Head, *, temperature: Temperature = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy of each distribution at the given temperature, both [tokens]."""

    def part(hidden: Tensor, targets: Tensor, own: Temperature = temperature) -> tuple[Tensor, Tensor]:
        log_probs = divided(head(hidden).float(), own).log_softmax(-1)  # [chunk, vocabulary]
        entropy = -(log_probs.exp() * log_probs.clamp(min=LOWEST_LOG_PROB)).sum(-1)  # 0 x -inf would be NaN
        return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy

    temperatures = (temperature,) if isinstance(temperature, Tensor) else ()
    log_probs, entropy = in_chunks(part, hidden, targets, *temperatures, chunk=chunk)
    return log_probs, entropy


def distillation_terms(
    hidden: Tensor, teacher_hidden: Tensor, targets: Tensor, head: Head, teacher_head: Head, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return (log p(target), sum over the vocabulary of p_teacher x log p_student), each [tokens]."""

    def part(hidden: Tensor, teacher_hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_hidden)  # [chunk, vocabulary]
        return kd_terms(head(hidden), teacher_logits, targets)

    log_probs, cross = in_chunks(part, hidden, teacher_hidden, targets, chunk=chunk)
    return log_probs, cross


def plain_linear(head: Head) -> tuple[Tensor, float] | None:
    """Return (weight, factor) of a head that is a matrix product times a factor; None if the head must be called.

    Under ZeRO-3 (parameters marked with `ds_id`) it must be called, because a weight is complete only while its module
    runs.
    """
    module, factor = (head.module, head.factor) if isinstance(head, VocabularyHead) else (head, 1.0)
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear or not factor:
        return None  # a subclass may do more than multiply
    return (module.weight, factor) if module.bias is None and not hasattr(module.weight, "ds_id") else None


def part_of(temperature: Temperature, part: slice) -> Temperature:
    """Return the temperatures of a chunk of tokens."""
    return temperature[part] if isinstance(temperature, Tensor) else temperature


class TargetLogProbs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the targets, in fp32, for logits [tokens, vocabulary]."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext, logits: Tensor, targets: Tensor, temperature: Temperature, passes: LogitPasses
    ) -> Tensor:
        log_probs = passes.log_probs(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, log_probs)
        ctx.temperature, ctx.passes = temperature, passes
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        off = ctx.passes.off(*ctx.saved_tensors, ctx.temperature)
        return off.mul_((-gradient / ctx.temperature)[:, None]), None, None, None


class LinearLogProbs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T / temperature) at the targets, with a hand-written backward pass.

    The gradient with respect to the logits is (one-hot - softmax) / temperature.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Temperature,
        chunk: int,
        passes: LogitPasses,
    ) -> Tensor:
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        for place in range(0, len(targets), chunk):
            part = slice(place, place + chunk)
            logits = hidden[part] @ weight.T  # [chunk, vocabulary]
            log_probs[part] = passes.log_probs(logits, targets[part], part_of(temperature, part))
        ctx.save_for_backward(hidden, weight, targets, log_probs)
        ctx.temperature, ctx.chunk, ctx.passes = temperature, chunk, passes
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Compute the gradients chunk by chunk.

        The factor of each token multiplies [chunk, hidden] instead of the larger [chunk, vocabulary].
        """
        hidden, weight, targets, log_probs = ctx.saved_tensors
        to_hidden, to_weight = (  # [tokens, hidden] and [vocabulary, hidden]
            torch.zeros_like(tensor) if wanted else None
            for tensor, wanted in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        factor = (-gradient / ctx.temperature)[:, None]  # [tokens, 1]
        for place in range(0, len(targets), ctx.chunk):
            part = slice(place, place + ctx.chunk)
            logits = hidden[part] @ weight.T  # [chunk, vocabulary]
            off = ctx.passes.off(logits, targets[part], log_probs[part], part_of(ctx.temperature, part))
            if to_hidden is not None:
                to_hidden[part] = (off @ weight) * factor[part]
            if to_weight is not None:
                to_weight.addmm_(off.T, (hidden[part] * factor[part]).to(hidden.dtype))
        return to_hidden, to_weight, None, None, None, None


class FrozenLinearLogProbs(torch.autograd.Function):
    """The log-probs of `LinearLogProbs` for a weight that is not trained; their gradient is computed with them.

    Each log-prob depends only on the hidden state of its own token, so its gradient [hidden] can be computed while its
    logits exist, and the backward pass multiplies it by the gradient of the log-prob.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Temperature,
        chunk: int,
        passes: LogitPasses,
    ) -> Tensor:
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        slopes = torch.empty_like(hidden)  # [tokens, hidden]: of -log p(target) x temperature
        for place in range(0, len(targets), chunk):
            part = slice(place, place + chunk)
            logits, own = hidden[part] @ weight.T, part_of(temperature, part)  # [chunk, vocabulary]
            log_probs[part] = passes.log_probs(logits, targets[part], own)
            slopes[part] = passes.off(logits, targets[part], log_probs[part], own) @ weight
        ctx.save_for_backward(slopes)
        ctx.temperature = temperature
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (slopes,) = ctx.saved_tensors
        to_hidden = slopes * (-gradient / ctx.temperature)[:, None]
        return to_hidden.to(slopes.dtype), None, None, None, None, None
