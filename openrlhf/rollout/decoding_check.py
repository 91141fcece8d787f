"""Choose the decoding strategy for a model by testing each one on a few tokens.

The test covers all operations on the cache: prefilling rows together and separately, adding rows, decoding steps, and
removing rows:

    prefill rows 0 1 2  ->  2 steps  ->  prefill row 3 and add it  ->  2 steps  ->  keep rows 1 2 3  ->  2 steps

Rows 1 and 2 are samples of the same prompt. The log-probs of each step are compared with those of the model's own
forward on each whole sequence, without a cache. `HFEngine` uses the fastest strategy that agrees:

    continuous batching  ->  continuous batching, prompts prefilled by length  ->  one batch per prompt length
    ->  row by row  ->  no cache, in the layout of training  ->  no cache, row by row

Each strategy with a cache is tried with SDPA first (in groups, if the model has fewer key heads than query heads), then
with eager attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.agreement import FAILURES, describe_error, measure_rounding, random_rows, relative_error
from openrlhf.models.forward import Network
from openrlhf.models.grouped_attention import GROUPED, has_groups
from openrlhf.models.modes import attention_in, evaluating
from openrlhf.monitor import say
from openrlhf.rollout.decoding import ContinuousBatching, Decoding
from openrlhf.rollout.fallback_decoding import OwnCaches, Uncached

FAST = "sdpa"  # fast attention for left-padded rows with a cache
PLAIN = "eager"  # attention that every model supports
# Lengths in tokens. Two rows have the same prompt, and one prompt is shorter than the convolutions of recurrent layers.
PROMPTS = (11, 6, 6, 2)
STEPS = 6  # number of tokens after each prompt
LIKELIEST = 32  # number of most likely tokens to compare at each position


def choose_decoding(network: Network, strategies: Iterable[Decoding] | None = None) -> Decoding:
    """Return the fastest strategy that reproduces the model's own log-probs; report it if it is not the first one."""
    strategies = strategies_for(network) if strategies is None else strategies
    if not network.self_test:
        return next(iter(strategies))
    name = type(network.decoder).__name__
    try:
        probe = make_probe(network.decoder)
    except FAILURES as failure:
        raise ConfigError(
            f"{name} cannot run here: its own forward pass fails with {describe_error(failure)}"
        ) from failure
    problems: list[str] = []
    for strategy in strategies:
        try:
            with evaluating(network.decoder, strategy.attention):
                found, own = exercise(strategy, probe)
            excess, problem = relative_error(found, own, probe.rounding)
        except FAILURES as failure:
            excess, problem = math.inf, f"fails with {describe_error(failure)}"
        if excess <= 1.0:
            if problems:
                say(f"{name}: {problems[0]}, so it generates with {strategy}")
            return strategy
        problems.append(f"{strategy} {problem}")
    ends = "; ".join(dict.fromkeys((problems[0], problems[-1])))  # report the first and the last strategy
    raise ConfigError(
        f"no decoding strategy reproduces the forward pass of {name}: {ends}",
        try_this="vLLM (--vllm_num_engines 1), or --skip_self_test to generate anyway",
    )


def strategies_for(network: Network) -> Iterator[Decoding]:
    """Yield strategies from fast to slow; a model with eager attention keeps it."""
    decoder = network.decoder
    own = attention_in(decoder)
    attentions: tuple[str, ...] = (GROUPED, FAST, PLAIN) if has_groups(decoder.config) else (FAST, PLAIN)
    if own == PLAIN or not decoder._can_set_attn_implementation():
        attentions = (own,)
    for pads_prompts in (True, False):
        for attention in attentions:
            yield ContinuousBatching(decoder, attention, pads_prompts, network.routed)
    for by_length in (True, False):
        for attention in attentions:
            yield OwnCaches(decoder, attention, by_length)
    yield Uncached(network)
    yield Uncached(network, PLAIN, row_by_row=True)


@dataclass(frozen=True)
class DecodingProbe:
    """A few sequences, and the log-probs of the model's own forward for them."""

    sequences: list[list[int]]
    tokens: list[Tensor]  # per sequence [tokens, likeliest]: the most likely next tokens at each position
    log_probs: list[Tensor]  # log-probs of these tokens, with the same shapes
    rounding: float | None  # rounding error in half precision (see `measure_rounding`); None in fp32


@torch.no_grad()
def make_probe(decoder: PreTrainedModel) -> DecodingProbe:
    """Compute the model's own results with eager attention, and its rounding error in half precision."""
    lengths = [length + STEPS for length in PROMPTS]
    sequences = [row.tolist() for row in random_rows(decoder.config.get_text_config().vocab_size, lengths)]
    sequences[2][: PROMPTS[2]] = sequences[1][: PROMPTS[1]]
    with evaluating(decoder, PLAIN):
        own = own_log_probs(decoder, sequences)  # [tokens, vocabulary] each
        tokens = [found.topk(min(LIKELIEST, found.shape[-1])).indices for found in own]  # [tokens, likeliest] each

        def likeliest(whole: Sequence[Tensor]) -> list[Tensor]:
            return [found.gather(-1, chosen) for found, chosen in zip(whole, tokens, strict=True)]

        rounding = measure_rounding(
            decoder,
            torch.cat(likeliest(own)),
            lambda: torch.cat(likeliest(own_log_probs(decoder, sequences))),
            decoder.dtype,
        )
    return DecodingProbe(sequences, tokens, likeliest(own), rounding)


def own_log_probs(decoder: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return log-probs [tokens, vocabulary] of each sequence from the model's own forward, without a cache."""
    rows = [torch.tensor([list(sequence)], device=decoder.device) for sequence in sequences]  # [1, tokens] each
    return [decoder(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in rows]


@torch.no_grad()
def exercise(strategy: Decoding, probe: DecodingProbe) -> tuple[Tensor, Tensor]:
    """Test a strategy; return (its log-probs, the model's own log-probs), both flattened.

    Three rows start, a fourth is added after two steps, and after two more the longest is removed, together with
    padding columns.
    """
    read = [len(sequence) - STEPS for sequence in probe.sequences]  # tokens of each sequence processed so far
    found: list[Tensor] = []
    own: list[Tensor] = []

    def compare(numbers: Sequence[int], logits: Tensor) -> None:
        for number, row in zip(numbers, logits, strict=True):
            place = read[number] - 1
            found.append(row.float().log_softmax(-1)[probe.tokens[number][place]])  # [likeliest]
            own.append(probe.log_probs[number][place])

    running = [0, 1, 2]
    rows, logits = strategy.prefill([probe.sequences[number][: read[number]] for number in running])
    compare(running, logits)
    for step in range(STEPS):
        if step == 2:
            more, logits = strategy.prefill([probe.sequences[3][: read[3]]])
            compare([3], logits)
            rows.add(more)
            running = [0, 1, 2, 3]
        elif step == 4:
            rows.keep([1, 2, 3])
            running = [1, 2, 3]
        logits = rows.step([probe.sequences[number][read[number]] for number in running], [False] * len(running))
        for number in running:
            read[number] += 1
        compare(running, logits)
    return torch.cat(found), torch.cat(own)
