"""Choice of the decoding strategy for a model: each is tried on a few tokens before anything is generated.

Rows are prefilled together and separately, join, take steps and leave, so that the cache goes through everything that
generation does to it. The log-probs along the way are compared with those of the model's own forward over each whole
sequence alone, without a cache. The fastest strategy that agrees is chosen:

    continuous batching  ->  the same, prompts prefilled by length  ->  one batch per prompt length  ->  row by row
    ->  no cache, in training's layout  ->  no cache, row by row

Each strategy with a cache is tried with SDPA first, then with eager attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.models.running import attention_in
from openrlhf.models.self_test import (
    FAILURES,
    FP32_TOLERANCE,
    LEAST_ROUNDING,
    ROUNDINGS,
    first_line,
    measure_rounding,
)
from openrlhf.monitor import say
from openrlhf.rollout.decoding import ContinuousBatching, Decoding, OwnCaches, Uncached, evaluating

FAST = "sdpa"  # attention over left-padded rows with a cache
PLAIN = "eager"  # attention that every model has
PROMPTS = (11, 6, 6, 2)  # tokens; two of equal length, and one shorter than the convolutions of recurrent layers
STEPS = 6  # tokens after each prompt
LIKELIEST = 32  # how many of the likeliest tokens are compared at each position


def choose_decoding(network: Network, ways: Iterable[Decoding] | None = None) -> Decoding:
    """Return the fastest strategy that gives the model's own log-probs; print a line if it is not the first one."""
    ways = ways_to_decode(network) if ways is None else ways
    if not network.self_test:
        return next(iter(ways))
    name = type(network.decoder).__name__
    try:
        probe = make_probe(network.decoder)
    except FAILURES as failure:
        raise ConfigError(f"{name} cannot run here: by itself it fails with {first_line(failure)}") from failure
    problems: list[str] = []
    for way in ways:
        try:
            with evaluating(network.decoder, way.attention):
                error = probe.error(*go_through(way, probe))
            problem = f"is off by {error:.2g} ({probe.allowed:.2g} allowed)"
        except FAILURES as failure:
            error, problem = math.inf, f"fails with {first_line(failure)}"
        if error <= probe.allowed:
            if problems:
                say(f"{name}: {problems[0]}, so it generates by {way.description}")
            return way
        problems.append(f"{way.description} {problem}")
    ends = "; ".join(dict.fromkeys((problems[0], problems[-1])))  # report the fastest strategy and the last resort
    raise ConfigError(
        f"{name} does not generate here what it computes by itself: {ends}",
        try_this="vLLM as the engine, or --skip_self_test to generate all the same",
    )


def ways_to_decode(network: Network) -> Iterator[Decoding]:
    """Yield strategies, fastest first. A model that runs with eager attention, by request or necessity, keeps it."""
    decoder = network.decoder
    own = attention_in(decoder)
    attentions = (own,) if own == PLAIN or not decoder._can_set_attn_implementation() else (FAST, PLAIN)
    for pads_prompts in (True, False):
        for attention in attentions:
            yield ContinuousBatching(decoder, attention, pads_prompts)
    for by_length in (True, False):
        for attention in attentions:
            yield OwnCaches(decoder, attention, by_length)
    yield Uncached(network)
    yield Uncached(network, PLAIN, row_by_row=True)


@dataclass(frozen=True)
class Probe:
    """A few sequences, and the log-probs that the model itself computes for them."""

    sequences: list[list[int]]
    tokens: list[Tensor]  # for each sequence [tokens, likeliest]: the likeliest next tokens at each position
    log_probs: list[Tensor]  # their log-probs, of the same shape
    rounding: float | None  # of a model in half precision (see `measure_rounding`); None in fp32

    @property
    def allowed(self) -> float:
        return FP32_TOLERANCE if self.rounding is None else ROUNDINGS * max(self.rounding, LEAST_ROUNDING)

    def error(self, found: Tensor, own: Tensor) -> float:
        """Return the largest difference in fp32, the mean one in half precision: rounding blurs single numbers.

        In fp32, log-probs beyond 1 in magnitude count by their relative difference.
        """
        off = (found - own).abs().nan_to_num(math.inf)
        return float((off / own.abs().clamp(min=1.0)).max() if self.rounding is None else off.mean())


@torch.no_grad()
def make_probe(decoder: PreTrainedModel) -> Probe:
    """Compute the model's own answers with eager attention, and its rounding if it is in half precision."""
    sequences = random_sequences(decoder.config.get_text_config().vocab_size)
    with evaluating(decoder, PLAIN):
        own = own_log_probs(decoder, sequences)
        tokens = [found.topk(min(LIKELIEST, found.shape[-1])).indices for found in own]

        def likeliest(whole: Sequence[Tensor]) -> list[Tensor]:
            return [found.gather(-1, chosen) for found, chosen in zip(whole, tokens, strict=True)]

        rounding = measure_rounding(
            decoder,
            torch.cat(likeliest(own)),
            lambda: torch.cat(likeliest(own_log_probs(decoder, sequences))),
        )
    return Probe(sequences, tokens, likeliest(own), rounding)


def own_log_probs(decoder: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return log-probs [tokens, vocabulary] of each whole sequence alone: the model's own forward without a cache."""
    rows = [torch.tensor([list(sequence)], device=decoder.device) for sequence in sequences]
    return [decoder(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in rows]


def random_sequences(vocabulary: int) -> list[list[int]]:
    """Return prompts with the tokens that follow, from the middle of the vocabulary: special tokens are at its ends."""
    low, high = vocabulary // 4, max(vocabulary // 4 + 1, 3 * vocabulary // 4)
    stream = torch.Generator().manual_seed(0)
    return [torch.randint(low, high, (length + STEPS,), generator=stream).tolist() for length in PROMPTS]


@torch.no_grad()
def go_through(way: Decoding, probe: Probe) -> tuple[Tensor, Tensor]:
    """Put a strategy through the test; return (its log-probs, the model's own), each flattened to one dimension.

    Three rows start; a fourth joins after two steps; after two more the longest leaves, and padding columns with it.
    """
    read = [len(sequence) - STEPS for sequence in probe.sequences]  # tokens of each that the strategy has seen so far
    found: list[Tensor] = []
    own: list[Tensor] = []

    def compare(numbers: Sequence[int], logits: Tensor) -> None:
        for number, row in zip(numbers, logits, strict=True):
            place = read[number] - 1
            found.append(row.float().log_softmax(-1)[probe.tokens[number][place]])
            own.append(probe.log_probs[number][place])

    def step(numbers: Sequence[int]) -> None:
        logits = rows.step([probe.sequences[number][read[number]] for number in numbers], [False] * len(numbers))
        for number in numbers:
            read[number] += 1
        compare(numbers, logits)

    rows, logits = way.prefill([probe.sequences[number][: read[number]] for number in (0, 1, 2)])
    compare([0, 1, 2], logits)
    for _ in range(2):
        step([0, 1, 2])
    more, logits = way.prefill([probe.sequences[3][: read[3]]])
    compare([3], logits)
    rows.add([more])
    for _ in range(2):
        step([0, 1, 2, 3])
    rows.keep([1, 2, 3])
    for _ in range(2):
        step([1, 2, 3])
    return torch.cat(found), torch.cat(own)
