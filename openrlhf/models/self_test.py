"""A test of every model at load time: does `Network` compute what the model's own forward computes?

Packed rows, padded rows, attention kernels and heads each work for most architectures and are silently wrong for some:
a recurrent layer carries its state into the next sequence, or a model ignores the mask it is given or caps its logits
in its own way. So the backends call `choose_layout`, which tests each model with a few random tokens:

    1. own       the model's own forward: eager attention, each sequence alone
    2. together  all sequences as one micro-batch in the layout of the run: must equal 1
    3. leak      the same with every other sequence changed: the answers of the others must not change
    4. training  in training mode, if the network is trained: must equal 1, with a finite gradient

If the test fails, the next slower layout is tried:

    packed  ->  padded with SDPA  ->  padded with eager attention  ->  row by row  ->  rejected

agreement.py defines what "equal" means, in half precision too.
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
from openrlhf.models.forward import LogProbs, Network, OwnLogProbs, OwnScores, Scores, Wanted
from openrlhf.models.inputs import CallLayout
from openrlhf.monitor import say
from openrlhf.types import Batch, TokenRow

LENGTHS = (14, 9, 17, 5, 12, 7)  # most exceed a convolution's reach; their ends fall at varied places in a chunked scan
FP32_LEAK = 1e-5  # allowed change if only other sequences change; small, as a decaying state leaks little in few tokens
LEAST_LEAK = 1e-3  # the same in half precision, on average


class BackendForward(Protocol):
    """A backend's forward: outputs without gradients."""

    def __call__(self, batch: Batch, wanted: type[Wanted]) -> Wanted: ...


@dataclass(frozen=True)
class Candidate:
    """One way to run a network: the layout of sequences, the attention implementation, and the layers' kernels."""

    layout: CallLayout
    attention: str
    own_kernels: bool = True  # of packages such as flash-linear-attention; False: PyTorch's, which are slow

    def __str__(self) -> str:
        kernel = "the packed kernel" if self.attention == SEGMENTED else self.attention
        words = f"{self.layout} with {kernel}" if self.layout != "row by row" else "row by row"
        return words if self.own_kernels else f"{words} and the reference kernels of PyTorch"


@dataclass(frozen=True)
class LayoutProbe:
    """A test batch for a network, and the outputs of the model's own forward for it."""

    batch: Batch
    wanted: type[LogProbs | Scores]
    own: Tensor  # log-probs [targets] or scores [sequences], by the model's own forward, each sequence alone
    rounding: float | None  # mean rounding error of a half-precision model; None in fp32


def choose_layout(network: Network, forward: BackendForward, worst: Callable[[float], float] = float) -> None:
    """Set the fastest layout in which a network is correct, or reject the model.

    `forward` runs the network as the run will; `worst` returns the maximum of a number over all processes.
    """
    if not network.self_test:
        return
    decoder = network.decoder
    name = type(decoder).__name__
    asked = Candidate(network.layout, modes.attention_in(decoder))
    probe = make_probe(network, forward)
    # Sharded weights are complete only inside a backend's own passes, so no gradient is computed here for these.
    trains = not agreement.is_sharded(network) and any(parameter.requires_grad for parameter in network.parameters())
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
            return
        problems.append(f"{candidate} {problem}")
    raise ConfigError(
        f"{name} does not match its own forward in any layout: {'; '.join(problems)}",
        try_this="another model, or --skip_self_test to run it anyway",
    )


def candidates(network: Network) -> Iterator[Candidate]:
    """Yield the candidates, fastest first, starting with the one that the network was loaded for."""
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
    """Compute the model's own answer: eager attention, PyTorch's kernels, each sequence alone."""
    decoder = network.decoder
    # Sequences of random tokens, packed into one row. A sequence classifier would take the pad token for the end of a
    # sequence, so a token that is not among the random ones replaces it.
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
            rounding = agreement.measure_rounding(decoder, own, lambda: answers(forward(batch, own_kind), batch))
    except agreement.FAILURES as failure:
        adapted = network.model is not decoder
        how = "its forward with adapters" if adapted else "its own forward"
        raise ConfigError(
            f"{name} cannot run here: {how} fails with {agreement.describe_error(failure)}",
            try_this="other --target_modules, or --lora_rank 0" if adapted else None,
        ) from failure
    if own.isnan().any():
        raise ConfigError(f"{name} computes nan for random tokens", try_this="--param_dtype bf16 or fp32")
    return LayoutProbe(batch, Scores if scalar else LogProbs, own, rounding)


def answers(outputs: LogProbs | Scores, batch: Batch) -> Tensor:
    """Return the numbers to compare, on the CPU: log-probs [targets] or scores [sequences]."""
    found = outputs.scores if isinstance(outputs, Scores) else outputs.log_probs.cpu()[batch.target_mask]
    return found.float().cpu()


def check_forward(forward: BackendForward, probe: LayoutProbe) -> tuple[float, str]:
    """Return (the worse of two errors as a fraction of what is allowed, a description of it).

    The first error is the difference from the model's own answer. The second is a leak: if the tokens of every other
    sequence change, the answers of the rest must not. Most kernels round equal shapes equally, so a leak shows even if
    it is far below the model's rounding. Changing the last sequence, which no causal model lets the others see,
    measures how equally they round.
    """
    batch = probe.batch
    found = answers(forward(batch, probe.wanted), batch)
    # [answers]: the sequence that each belongs to
    owners = torch.arange(len(LENGTHS)) if probe.wanted is Scores else batch.sequence_ids[batch.target_mask]

    def change(numbers: range) -> Tensor:
        """Return how much the answers of the other sequences change if these sequences are reversed."""
        ids = batch.input_ids.clone()  # [1, tokens]
        for number in numbers:
            places = batch.sequence_ids == number
            ids[places] = ids[places].flip(0)
        others = answers(forward(replace(batch, input_ids=ids), probe.wanted), batch)
        return agreement.distance(found, others)[~torch.isin(owners, torch.tensor(numbers))]

    every_second, last = range(0, len(LENGTHS), 2), range(len(LENGTHS) - 1, len(LENGTHS))
    if probe.rounding is None:
        leaked, allowed = float(change(every_second).max()), FP32_LEAK
    else:
        noise = float(change(last).mean())
        leaked, allowed = float(change(every_second).mean()), LEAST_LEAK + agreement.ROUNDINGS * noise
    excess, problem = agreement.relative_error(found, probe.own, probe.rounding)
    if not leaked / allowed <= excess:
        return leaked / allowed, f"lets sequences see each other ({leaked:.2g}, {allowed:.2g} allowed)"
    return excess, problem


def check_training(network: Network, probe: LayoutProbe) -> tuple[float, str]:
    """Return the error in training mode, in which some layers use other kernels; infinite if gradients are not finite.

    A network with dropout or other noise is not compared, only its gradient is checked.
    """
    batch = probe.batch.to(network.decoder.device)
    # A small parameter among the first: an early one, so that its gradient passes through the layers above.
    learned = (parameter for parameter in network.parameters() if parameter.requires_grad)
    parameter = min(islice(learned, 16), key=lambda parameter: parameter.numel())
    was_training = network.training
    try:
        network.eval()  # no recomputation of activations: its reentrant form does not support `autograd.grad`
        with torch.enable_grad():
            outputs = network(batch, probe.wanted)
            total = (outputs.scores if isinstance(outputs, Scores) else outputs.log_probs).sum()
            (gradient,) = torch.autograd.grad(total, [parameter], allow_unused=True)
        if gradient is not None and not torch.isfinite(gradient).all():
            return math.inf, "has gradients that are not finite"
        settings = network.decoder.config.get_text_config().to_dict()
        noisy = (value for name, value in settings.items() if any(word in name for word in ("drop", "jitter", "noise")))
        dropout = (module.p for module in network.modules() if isinstance(module, nn.Dropout))
        if any(isinstance(value, float) and value > 0 for value in chain(noisy, dropout)):
            return 0.0, ""
        with torch.no_grad():
            found = answers(network.train()(batch, probe.wanted), probe.batch)
        return agreement.relative_error(found, probe.own, probe.rounding)
    finally:
        network.train(was_training)
