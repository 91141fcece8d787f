"""A test of every model at load time: does `Network` compute what the model's own forward computes?

Packed rows, padded rows, attention kernels and heads each work for most architectures and are silently wrong for some:
a recurrent layer carries its state into the next sequence, or a model ignores the mask it is given or caps its logits
in a way of its own. So the backends test each model with a few random tokens. A micro-batch of several sequences, in
the layout of the run, must give the same results as the model's own forward over each sequence alone; and if the tokens
of every second sequence change, the results of the others must not. A network that is trained must pass in training
mode too, with a finite gradient. If the test fails, the next slower layout is tried:

    packed  ->  padded with SDPA  ->  padded with eager attention  ->  row by row  ->  rejected

In half precision, two correct computations also differ, by the model's own rounding. That is measured: the same weights
compute the same tokens in fp32, one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.data.collate import pack
from openrlhf.errors import ConfigError
from openrlhf.models.attention import FLASH_PACKAGES, SEGMENTED, takes_sdpa
from openrlhf.models.forward import LogProbs, Network, OwnLogProbs, OwnScores, Scores, Wanted
from openrlhf.models.inputs import CallLayout
from openrlhf.models.running import (
    attention_in,
    attention_of,
    in_fp32,
    kernel_functions,
    reference_kernels,
    set_attention,
    use_reference_kernels,
)
from openrlhf.monitor import say
from openrlhf.types import Batch, TokenRow

LENGTHS = (14, 9, 17, 5, 12, 7)  # most longer than a convolution's reach; they end at many places of a chunked scan
FP32_TOLERANCE = 1e-4  # largest difference of a log-prob, in nats
FP32_LEAK = 1e-5  # the same if only other sequences change: a state that decays shows little in so few tokens
ROUNDINGS = 4.0  # in half precision: mean difference, in multiples of the model's own rounding
LEAST_ROUNDING = 5e-3
LEAST_LEAK = 1e-3  # in half precision, on average
SHARDED_ROUNDING = 0.05  # assumed for sharded weights, for which it is not measured
# Errors that third-party code raises on inputs that it does not support.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, ImportError, LookupError, NotImplementedError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Forward(Protocol):
    """A backend's forward: outputs without gradients."""

    def __call__(self, batch: Batch, wanted: type[Wanted]) -> Wanted: ...


@dataclass(frozen=True)
class Candidate:
    """A way to compute: the layout of sequences, the attention implementation, and the kernels of the layers."""

    layout: CallLayout
    attention: str
    own_kernels: bool = True  # of packages such as flash-linear-attention; False: PyTorch's, which are slow

    def __str__(self) -> str:
        kernel = "the packed kernel" if self.attention == SEGMENTED else self.attention
        words = f"{self.layout} with {kernel}" if self.layout != "row by row" else "row by row"
        return words if self.own_kernels else f"{words} and the reference kernels of PyTorch"


@dataclass(frozen=True)
class Probe:
    """The question for a network, and the model's own answer."""

    batch: Batch
    wanted: type[LogProbs | Scores]
    own: Tensor  # log-probs or scores, by the model's own forward, each sequence alone
    rounding: float | None  # mean rounding error of a half-precision model; None in fp32


def settle_layout(network: Network, forward: Forward, worst: Callable[[float], float] = float) -> None:
    """Choose the fastest layout in which a network is correct, or reject the model.

    `forward` runs the network as the run will; `worst` returns the maximum of a number over all processes.
    """
    if not network.self_test:
        return
    decoder = network.decoder
    name = type(decoder).__name__
    asked = Candidate(network.layout, attention_in(decoder))
    probe = make_probe(network, forward)
    problems: list[str] = []
    kernels_train = True  # kernels of other packages may have no backward pass on this machine
    for candidate in candidates(network):
        if candidate.own_kernels and not kernels_train:
            continue
        network.layout = candidate.layout
        try:
            set_attention(decoder, candidate.attention)
            with nullcontext() if candidate.own_kernels else reference_kernels(decoder):
                excess, problem = judge_forward(forward, probe)
                if excess <= 1.0 and learns_here(network):
                    kernels_train = not kernel_functions(decoder)
                    excess, problem = judge_training(network, probe)
                    kernels_train = True
        except FAILURES as failure:
            excess, problem = math.inf, f"fails with {first_line(failure)}"
        if worst(excess) <= 1.0:
            if not candidate.own_kernels:
                use_reference_kernels(decoder)
            if candidate != asked:
                say(f"{name}: {problems[0]}, so it runs {candidate}")
            return
        problems.append(f"{candidate} {problem}")
    raise ConfigError(
        f"{name} does not compute here what it computes by itself: {'; '.join(problems)}",
        try_this="another model, or --skip_self_test to run it all the same",
    )


def make_probe(network: Network, forward: Forward) -> Probe:
    """Compute the model's own answer: eager attention, PyTorch's kernels, each sequence alone."""
    decoder = network.decoder
    batch = probe_batch(decoder)
    scalar = decoder.get_output_embeddings() is None
    own_kind = OwnScores if scalar else OwnLogProbs
    name = type(decoder).__name__
    try:
        with attention_of(decoder, "eager"), reference_kernels(decoder):
            own = answers(forward(batch, own_kind), batch)
            rounding = measure_rounding(decoder, own, lambda: answers(forward(batch, own_kind), batch))
    except FAILURES as failure:
        adapted = network.model is not decoder
        how = "with its adapters" if adapted else "by itself"
        raise ConfigError(
            f"{name} cannot run here: {how} it fails with {first_line(failure)}",
            try_this="other --target_modules, or --lora_rank 0" if adapted else None,
        ) from failure
    if own.isnan().any():
        raise ConfigError(f"{name} computes nan for random tokens", try_this="--param_dtype bf16 or fp32")
    return Probe(batch, Scores if scalar else LogProbs, own, rounding)


def judge_forward(forward: Forward, probe: Probe) -> tuple[float, str]:
    """Return (the worse of two errors as a fraction of what is allowed, a description of it).

    The first error is the difference to the model's own answer. The second is a leak: if the tokens of every second
    sequence change, the answers of the others must not. Most kernels round equal shapes equally, so a leak shows even
    if it is far below the model's rounding. How equally they round is measured by changing the last sequence, which no
    causal model lets the others see.
    """
    found = answers(forward(probe.batch, probe.wanted), probe.batch)

    def change(numbers: range) -> Tensor:
        """Return how far the answers of the other sequences move if these sequences get other tokens."""
        others = answers(forward(with_reversed(probe.batch, numbers), probe.wanted), probe.batch)
        return distance(found, others)[~of_sequences(probe, numbers)]

    every_second, last = range(0, len(LENGTHS), 2), range(len(LENGTHS) - 1, len(LENGTHS))
    if probe.rounding is None:
        leaked, allowed = float(change(every_second).max()), FP32_LEAK
    else:
        noise = float(change(last).mean())
        leaked, allowed = float(change(every_second).mean()), LEAST_LEAK + ROUNDINGS * noise
    excess, problem = judge(found, probe)
    if not leaked / allowed <= excess:
        return leaked / allowed, f"lets sequences see each other ({leaked:.2g}, {allowed:.2g} allowed)"
    return excess, problem


def judge_training(network: Network, probe: Probe) -> tuple[float, str]:
    """Return the error in training mode, in which some layers use other kernels; infinite if gradients are not finite.

    A network with dropout or other noise is not compared, only its gradient is checked.
    """
    batch = probe.batch.to(network.decoder.device)
    was_training = network.training
    try:
        network.eval()  # no recomputation of activations: its reentrant form does not support `autograd.grad`
        with torch.enable_grad():
            outputs = network(batch, probe.wanted)
            total = (outputs.scores if isinstance(outputs, Scores) else outputs.log_probs).sum()
            (gradient,) = torch.autograd.grad(total, [_small_parameter(network)], allow_unused=True)
        if gradient is not None and not torch.isfinite(gradient).all():
            return math.inf, "has gradients that are not finite"
        if is_random(network):
            return 0.0, ""
        with torch.no_grad():
            found = answers(network.train()(batch, probe.wanted), probe.batch)
        return judge(found, probe)
    finally:
        network.train(was_training)


def learns_here(network: Network) -> bool:
    """True if gradients can be computed here: sharded weights are complete only inside a backend's own passes."""
    return not is_sharded(network) and any(parameter.requires_grad for parameter in network.parameters())


def _small_parameter(network: Network) -> nn.Parameter:
    """Return a small parameter among the first: an early one, so that its gradient passes through the layers above."""
    learned = (parameter for parameter in network.parameters() if parameter.requires_grad)
    return min(islice(learned, 16), key=lambda parameter: parameter.numel())


def is_random(network: Network) -> bool:
    """True if training mode adds noise, such as dropout or router jitter."""
    settings = network.decoder.config.get_text_config().to_dict()
    noisy = (value for name, value in settings.items() if any(word in name for word in ("drop", "jitter", "noise")))
    modules = (module.p for module in network.modules() if isinstance(module, nn.Dropout))
    return any(isinstance(value, float) and value > 0 for value in chain(noisy, modules))


def probe_batch(decoder: PreTrainedModel) -> Batch:
    """Return sequences of random tokens from the middle of the vocabulary, away from special tokens at either end."""
    config = decoder.config.get_text_config()
    random = np.random.default_rng(0)
    low, high = config.vocab_size // 4, max(3 * config.vocab_size // 4, config.vocab_size // 4 + 2)
    rows = [random.integers(low, high, length, dtype=np.int32) for length in LENGTHS]
    pad = getattr(config, "pad_token_id", None)  # a sequence classifier would take it for the end of a sequence
    return pack([TokenRow(np.where(row == pad, low - 1, row), np.ones(len(row), bool)) for row in rows])


def answers(outputs: LogProbs | Scores, batch: Batch) -> Tensor:
    """Return the numbers to compare, on the CPU: log-probs [targets] or scores [sequences]."""
    found = outputs.scores if isinstance(outputs, Scores) else outputs.log_probs.cpu()[batch.target_mask]
    return found.float().cpu()


def of_sequences(probe: Probe, numbers: range) -> Tensor:
    """Return a mask over the answers, True for those of these sequences."""
    scalar, batch = probe.wanted is Scores, probe.batch
    owners = torch.arange(len(LENGTHS)) if scalar else batch.sequence_ids[batch.target_mask]
    return torch.isin(owners, torch.tensor(numbers))


def with_reversed(batch: Batch, numbers: range) -> Batch:
    """Return the batch with the tokens of some sequences in reverse order."""
    ids = batch.input_ids.clone()
    for number in numbers:
        places = batch.sequence_ids == number
        ids[places] = ids[places].flip(0)
    return replace(batch, input_ids=ids)


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """Return absolute differences: 0 for a token that both consider impossible (-inf), infinite for NaN."""
    return torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(math.inf)


def judge(found: Tensor, probe: Probe) -> tuple[float, str]:
    """Return (the difference to the model's own answer as a fraction of what is allowed, a description of it).

    In fp32 the largest difference counts, otherwise the mean one: rounding blurs single numbers.
    """
    off = distance(found, probe.own)
    if probe.rounding is None:
        error, allowed = float((off / probe.own.abs().clamp(min=1.0)).max()), FP32_TOLERANCE
    else:
        error, allowed = float(off.mean()), ROUNDINGS * max(probe.rounding, LEAST_ROUNDING)
    return error / allowed, f"is off by {error:.2g} ({allowed:.2g} allowed)"


def candidates(network: Network) -> Iterator[Candidate]:
    """Yield the ways to compute, fastest first, starting with the one that the network was loaded for."""
    decoder = network.decoder
    attention = attention_in(decoder)
    yield Candidate(network.layout, attention)
    if network.ring is not None:
        return  # a ring works only on packed rows
    padded = [attention] if attention != SEGMENTED else []
    if attention in (SEGMENTED, *FLASH_PACKAGES) and takes_sdpa(type(decoder), decoder.config):
        padded.append("sdpa")
    padded += [] if attention == "eager" else ["eager"]
    yield from (Candidate("padded", kernel) for kernel in padded if (network.layout, kernel) != ("padded", attention))
    if not is_sharded(decoder):  # ranks with different numbers of sequences would deadlock
        yield Candidate("row by row", "eager")
    if kernel_functions(decoder):
        yield from (Candidate("padded", kernel, own_kernels=False) for kernel in padded)


def measure_rounding(decoder: PreTrainedModel, own: Tensor, compute: Callable[[], Tensor]) -> float | None:
    """Return the mean difference between a half-precision model and the same weights in fp32; None for fp32."""
    if decoder.dtype == torch.float32:
        return None
    if is_sharded(decoder):
        return SHARDED_ROUNDING
    with in_fp32(decoder):
        exact = compute()
    return float(distance(own, exact).mean())


def is_sharded(model: nn.Module) -> bool:
    """True under ZeRO-3, which marks its parameters with `ds_id`."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def first_line(error: Exception) -> str:
    """Return a description of an error in less than a line."""
    if isinstance(error, ConfigError):
        return error.message
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100] if lines else 'no message'}"
