"""A load-time test that `Network` computes the same results as the model's own forward.

Packed rows, padded rows, attention kernels and heads each work for most architectures and are silently wrong for some:
a recurrent layer carries its state into the next sequence, or a model ignores its mask or caps its logits. So the
backends call `choose_layout`, which tests each model with a few random tokens:

    1. own       run the model's own forward with eager attention, one sequence per call
    2. together  run all sequences as one micro-batch in the layout of the run: must equal 1
    3. leak      change every second sequence and repeat 2: the outputs of the other sequences must not change
    4. training  if the network is trained, run it in training mode: must equal 1, with a finite gradient
    5. prefixes  repeat 2, 3 and 4 with the common prefix of sequences computed once: outputs and a
                 gradient must equal those of separate copies

If the first four fail, the next slower layout is tried:

    packed  ->  padded with SDPA  ->  padded with eager attention  ->  row by row  ->  rejected

If only the last fails, prefixes are computed for every sequence. agreement.py defines the tolerance for each precision.
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

from openrlhf.data.collate import pack
from openrlhf.errors import ConfigError
from openrlhf.models import agreement, modes
from openrlhf.models.attention import FLASH_PACKAGES, SEGMENTED, takes_sdpa
from openrlhf.models.forward import LogProbs, Network, OwnLogProbs, OwnScores, Requested, Scores
from openrlhf.models.inputs import CallLayout
from openrlhf.monitor import say
from openrlhf.types import Batch, TokenRow

LENGTHS = (14, 9, 17, 5, 12, 7)  # most exceed the reach of a convolution; starts differ within the chunks of a scan
FP32_LEAK = 1e-5  # maximum change of a sequence if only its neighbours change; strict, because leaks may be small
PREFIX, OTHER_PREFIX = 19, 17  # tokens that the first two and the next two sequences of step 5 share
FP32_GRADIENT, HALF_GRADIENT = 1e-3, 0.2  # maximum relative difference of a gradient with shared prefixes
LEAST_LEAK = 1e-3  # mean change allowed in half precision, besides a multiple of the measured rounding errors


class BackendForward(Protocol):
    """A backend's forward pass without gradients."""

    def __call__(self, batch: Batch, kind: type[Requested]) -> Requested: ...


@dataclass(frozen=True)
class Candidate:
    """One way to run a network: the layout of sequences, the attention implementation, and the layers' kernels."""

    layout: CallLayout
    attention: str
    own_kernels: bool = True  # kernels of packages such as flash-linear-attention; False: slow PyTorch kernels

    def __str__(self) -> str:
        kernel = "the packed kernel" if self.attention == SEGMENTED else self.attention
        words = f"{self.layout} with {kernel}" if self.layout != "row by row" else "row by row"
        return words if self.own_kernels else f"{words} and the reference kernels of PyTorch"


@dataclass(frozen=True)
class LayoutProbe:
    """A test batch for a network, and the outputs of the model's own forward for it."""

    batch: Batch
    kind: type[LogProbs | Scores]
    own: Tensor  # log-probs [targets] or scores [sequences] of the model's own forward
    rounding: float | None  # mean rounding error of a half-precision model; None in fp32
    own_tokens: Tensor  # [1, tokens] bool: False for tokens that sequences share


def choose_layout(network: Network, forward: BackendForward, worst: Callable[[float], float] = float) -> None:
    """Set the fastest layout in which a network is correct, or reject the model.

    `forward` is the backend's forward pass; `worst` returns the maximum of a number over all processes.
    """
    if not network.self_test:
        return
    decoder = network.decoder
    name = type(decoder).__name__
    asked = Candidate(network.layout, modes.attention_in(decoder))
    probe = make_probe(network, forward)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    # Sharded weights are complete only inside the backend's passes, so gradients cannot be checked here.
    trains = trained and not agreement.is_sharded(network)
    problems: list[str] = []
    kernels_train = True  # kernels of other packages may have no backward pass on this machine
    for candidate in candidates(network):
        if candidate.own_kernels and not kernels_train:
            continue
        network.layout = candidate.layout
        try:
            modes.set_attention(decoder, candidate.attention)
            with nullcontext() if candidate.own_kernels else modes.reference_kernels(decoder):
                excess, problem = check_forward(forward, probe)
                if excess <= 1.0 and trains:
                    kernels_train = not modes.kernel_functions(decoder)
                    excess, problem = check_training(network, probe)
                    kernels_train = True
        except agreement.FAILURES as failure:
            excess, problem = math.inf, f"fails with {agreement.describe_error(failure)}"
        if worst(excess) <= 1.0:
            if not candidate.own_kernels:
                modes.use_reference_kernels(decoder)
            if candidate != asked:
                say(f"{name}: {problems[0]}, so it runs {candidate}")
            shareable = network.may_share_prefixes and not (trained and is_noisy(network))
            excess = check_prefixes(network, forward, probe, trains=trains) if shareable else math.inf
            network.shares_prefixes = worst(excess) <= 1.0
            return
        problems.append(f"{candidate} {problem}")
    raise ConfigError(
        f"no layout reproduces the forward pass of {name}: {'; '.join(problems)}",
        try_this="another model, or --skip_self_test to run it anyway",
    )


def candidates(network: Network) -> Iterator[Candidate]:
    """Yield the candidates from fast to slow, starting with the one that the network was loaded with."""
    decoder = network.decoder
    attention = modes.attention_in(decoder)
    yield Candidate(network.layout, attention)
    if network.ring is not None:
        return  # a ring works only on packed rows
    padded = [attention] if attention != SEGMENTED else []
    if attention in (SEGMENTED, *FLASH_PACKAGES) and takes_sdpa(type(decoder), decoder.config):
        padded.append("sdpa")
    padded += [] if attention == "eager" else ["eager"]
    yield from (Candidate("padded", kernel) for kernel in padded if (network.layout, kernel) != ("padded", attention))
    if not agreement.is_sharded(decoder):  # ranks with different numbers of sequences would deadlock
        yield Candidate("row by row", "eager")
    if modes.kernel_functions(decoder):
        yield from (Candidate("padded", kernel, own_kernels=False) for kernel in padded)


def make_probe(network: Network, forward: BackendForward) -> LayoutProbe:
    """Compute the model's own results with eager attention and PyTorch kernels, one sequence per call."""
    decoder = network.decoder
    # Pack sequences of random tokens into one row. A sequence classifier would mistake the pad token for the end of a
    # sequence, so replace it with a token outside the random range.
    config = decoder.config.get_text_config()
    pad, spare = getattr(config, "pad_token_id", None), config.vocab_size // 4 - 1
    rows = [np.where(row == pad, spare, row) for row in agreement.random_rows(config.vocab_size, LENGTHS)]
    batch = pack([TokenRow(row, np.ones(len(row), bool)) for row in rows])
    scalar = decoder.get_output_embeddings() is None
    own_kind = OwnScores if scalar else OwnLogProbs
    name = type(decoder).__name__
    try:
        with modes.attention_of(decoder, "eager"), modes.reference_kernels(decoder):
            own = answers(forward(batch, own_kind), batch)
            rounding = agreement.measure_rounding(
                decoder, own, lambda: answers(forward(batch, own_kind), batch), network.dtype
            )
    except agreement.FAILURES as failure:
        adapted = network.model is not decoder
        how = "its forward pass with adapters" if adapted else "its own forward pass"
        raise ConfigError(
            f"{name} cannot run here: {how} fails with {agreement.describe_error(failure)}",
            try_this="other --target_modules, or --lora_rank 0" if adapted else None,
        ) from failure
    if own.isnan().any():
        raise ConfigError(f"{name} computes nan for random tokens", try_this="--param_dtype bf16 or fp32")
    kind = Scores if scalar else LogProbs
    return LayoutProbe(batch, kind, own, rounding, torch.ones_like(batch.target_mask))


def answers(outputs: LogProbs | Scores, batch: Batch) -> Tensor:
    """Return the numbers to compare, on the CPU: log-probs [targets] or scores [sequences]."""
    found = outputs.scores if isinstance(outputs, Scores) else outputs.log_probs.cpu()[batch.target_mask]
    return found.float().cpu()


def check_forward(forward: BackendForward, probe: LayoutProbe) -> tuple[float, str]:
    """Return (the larger of two errors / the allowed error, description of the error).

    The first error is the difference from the model's own results. The second is a leak: if the tokens of every second
    sequence change, the results of the other sequences must not. Most kernels round identically for identical shapes,
    so even a leak far below the model's rounding error is visible. Changing only the last sequence, which cannot
    affect earlier ones in a causal model, measures the remaining noise.
    """
    batch = probe.batch
    found = answers(forward(batch, probe.kind), batch)
    count = batch.num_sequences
    # [answers]: the sequence of each answer
    owners = torch.arange(count) if probe.kind is Scores else batch.sequence_ids[batch.target_mask]

    def change(numbers: range) -> Tensor:
        """Reverse the unshared tokens of these sequences; return how much the results of all others change."""
        ids = batch.input_ids.clone()  # [1, tokens]
        for number in numbers:
            places = (batch.sequence_ids == number) & probe.own_tokens
            ids[places] = ids[places].flip(0)
        others = answers(forward(replace(batch, input_ids=ids), probe.kind), batch)
        return agreement.distance(found, others)[~torch.isin(owners, torch.tensor(numbers))]

    every_second, last = range(0, count, 2), range(count - 1, count)
    if probe.rounding is None:
        leaked, allowed = float(change(every_second).max()), FP32_LEAK
    else:
        noise = float(change(last).mean())
        leaked, allowed = float(change(every_second).mean()), LEAST_LEAK + agreement.ROUNDINGS * noise
    excess, problem = agreement.relative_error(found, probe.own, probe.rounding)
    if not leaked / allowed <= excess:
        return leaked / allowed, f"leaks between sequences ({leaked:.2g}, {allowed:.2g} allowed)"
    return excess, problem


def check_prefixes(network: Network, forward: BackendForward, probe: LayoutProbe, *, trains: bool) -> float:
    """Return the error / the allowed error of a network that computes each shared prefix once.

    The same network without shared prefixes, which has passed the test, is the reference: for its outputs and, if it is
    trained, for a gradient.
    """
    row, *rest = agreement.random_rows(network.decoder.config.get_text_config().vocab_size, (PREFIX, *LENGTHS))
    prefixes = [row, row, row[::-1][:OTHER_PREFIX], row[::-1][:OTHER_PREFIX], row[:0], row[:0]]
    rows = [np.concatenate([prefix, own]) for prefix, own in zip(prefixes, rest, strict=True)]
    batch = pack([TokenRow(ids, np.ones(len(ids), bool)) for ids in rows])
    # [1, tokens]: length of the prefix of each token's sequence
    shared = torch.tensor([len(prefix) for prefix in prefixes])[batch.sequence_ids]
    network.shares_prefixes = False
    expected = answers(forward(batch, probe.kind), batch)
    probe = LayoutProbe(batch, probe.kind, expected, probe.rounding, batch.position_ids >= shared)
    own = early_gradient(network, probe) if trains else None
    network.shares_prefixes = True
    if network.prefixes_of(batch) is None:  # its window is shorter than these sequences
        return math.inf
    try:
        excess, _ = check_forward(forward, probe)
        if trains and excess <= 1.0:
            excess, _ = check_training(network, probe)
            found = early_gradient(network, probe)
            if own is not None and found is not None and float(own.norm()) > 0:
                allowed = FP32_GRADIENT if probe.rounding is None else HALF_GRADIENT
                excess = max(excess, float((found - own).norm() / own.norm()) / allowed)
        return excess
    except agreement.FAILURES:
        return math.inf


def is_noisy(network: Network) -> bool:
    """Return whether a network adds noise in training, such as dropout."""
    settings = network.decoder.config.get_text_config().to_dict()
    noise = (value for name, value in settings.items() if any(word in name for word in ("drop", "jitter", "noise")))
    dropout = (module.p for module in network.modules() if isinstance(module, nn.Dropout))
    return any(isinstance(value, float) and value > 0 for value in chain(noise, dropout))


def check_training(network: Network, probe: LayoutProbe) -> tuple[float, str]:
    """Return the error in training mode, in which some layers use other kernels; infinite if gradients are not finite.

    For a network with dropout or other noise, only the gradient is checked.
    """
    gradient = early_gradient(network, probe)
    if gradient is not None and not torch.isfinite(gradient).all():
        return math.inf, "has gradients that are not finite"
    if is_noisy(network):
        return 0.0, ""
    was_training = network.training
    try:
        with torch.no_grad():
            found = answers(network.train()(probe.batch.to(network.decoder.device), probe.kind), probe.batch)
        return agreement.relative_error(found, probe.own, probe.rounding)
    finally:
        network.train(was_training)


def early_gradient(network: Network, probe: LayoutProbe) -> Tensor | None:
    """Return the gradient of a small parameter of an early layer, which passes through the layers above.

    None if the outputs do not depend on the parameter.
    """
    learned = (parameter for parameter in network.parameters() if parameter.requires_grad)
    parameter = min(islice(learned, 16), key=lambda parameter: parameter.numel())
    was_training = network.training
    try:
        network.eval()  # turns off recomputation, whose reentrant variant does not support autograd.grad
        with torch.enable_grad():
            outputs = network(probe.batch.to(network.decoder.device), probe.kind)
            total = (outputs.scores if isinstance(outputs, Scores) else outputs.log_probs).sum()
            (gradient,) = torch.autograd.grad(total, [parameter], allow_unused=True)
        return None if gradient is None else gradient.float()
    finally:
        network.train(was_training)
