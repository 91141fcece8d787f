"""Which way of decoding is right for a model: tried on a few tokens, before anything is generated.

Rows are prefilled together and apart, join, take steps and leave, so that a cache goes through everything that
generation does to it. The log-probs on the way are compared with those that the model's own forward gives each whole
sequence alone, without a cache. The fastest way that agrees is taken:

    continuous batching  ->  the same, prompts read by length  ->  one batch for each prompt length  ->  row by row
    ->  without a cache

each but the last with SDPA, then with eager attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.monitor import say
from openrlhf.rollout.decoding import ContinuousBatching, Decoding, OwnCaches, Uncached, evaluating

FAST = "sdpa"  # attention over left-padded rows with a cache
PLAIN = "eager"  # attention that every model has
PROMPTS = (11, 6, 6, 2)  # tokens; two of one length, and one shorter than the convolutions of recurrent layers
STEPS = 6  # tokens after each prompt
LIKELIEST = 32  # tokens whose log-probs are compared, at each place
FP32_TOLERANCE = 1e-4  # nats
HALF_TOLERANCE = 0.3  # nats
# What the code of a model raises on a cache, a mask or an attention that it does not know.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


def choose_decoding(network: Network, ways: Iterable[Decoding] | None = None) -> Decoding:
    """The fastest way that gives the model's own log-probs; a line says so when it is not the first one."""
    name = type(network.decoder).__name__
    sequences = random_sequences(network)
    own = own_log_probs(network, sequences)
    allowed = FP32_TOLERANCE if network.decoder.dtype == torch.float32 else HALF_TOLERANCE
    problems: list[str] = []
    for way in ways_to_decode(network) if ways is None else ways:
        try:
            with evaluating(network.decoder, way.attention):
                error = largest_difference(way, sequences, own)
            problem = f"is off by {error:.2g} nats ({allowed:.2g} allowed)"
        except torch.OutOfMemoryError:
            raise
        except FAILURES as failure:
            error, problem = math.inf, f"fails with {type(failure).__name__} ({' '.join(str(failure).split())[:120]})"
        if error <= allowed:
            if problems:
                say(f"{name} generates by {way.description}: {problems[0]}")
            return way
        problems.append(f"{way.description} {problem}")
    raise ConfigError(
        f"the Transformers engine cannot generate with {name} what the model computes by itself: {'; '.join(problems)}",
        try_this="vLLM: --vllm_num_engines 1, or --eval_task generate_vllm",
    )


def ways_to_decode(network: Network) -> Iterator[Decoding]:
    """Fastest first. A model that runs with eager attention, because it was asked for or it must, keeps it."""
    own = str(network.decoder.config._attn_implementation)
    attentions = (own,) if own == PLAIN or not network.decoder._can_set_attn_implementation() else (FAST, PLAIN)
    for pads_prompts in (True, False):
        for attention in attentions:
            yield ContinuousBatching(network, attention, pads_prompts)
    for by_length in (True, False):
        for attention in attentions:
            yield OwnCaches(network, attention, by_length)
    yield Uncached(network)


@torch.no_grad()
def largest_difference(way: Decoding, sequences: Sequence[list[int]], own: Sequence[Tensor]) -> float:
    """Of log-probs, in nats; infinite for logits that are not numbers.

    Three rows start; a fourth joins after two steps; after two more the longest leaves, and with it columns of padding.
    """
    read = [len(sequence) - STEPS for sequence in sequences]  # tokens of each so far
    differences: list[float] = []

    def compare(numbers: Sequence[int], logits: Tensor) -> None:
        for number, found in zip(numbers, logits, strict=True):
            expected, tokens = own[number][read[number] - 1].topk(min(LIKELIEST, logits.shape[-1]))
            difference = (found.float().log_softmax(-1)[tokens] - expected).abs()
            differences.append(float(difference.nan_to_num(math.inf).max()))

    def step(numbers: Sequence[int]) -> None:
        logits = rows.step([sequences[number][read[number]] for number in numbers], [False] * len(numbers))
        for number in numbers:
            read[number] += 1
        compare(numbers, logits)

    rows, logits = way.prefill([sequences[number][: read[number]] for number in (0, 1, 2)])
    compare([0, 1, 2], logits)
    for _ in range(2):
        step([0, 1, 2])
    more, logits = way.prefill([sequences[3][: read[3]]])
    compare([3], logits)
    rows.add([more])
    for _ in range(2):
        step([0, 1, 2, 3])
    rows.keep([1, 2, 3])
    for _ in range(2):
        step([1, 2, 3])
    return max(differences)


@torch.no_grad()
def own_log_probs(network: Network, sequences: Sequence[list[int]]) -> list[Tensor]:
    """Of each whole sequence alone [tokens, vocabulary], by the model's own forward, without a cache."""
    model = network.decoder
    with evaluating(model, PLAIN if model._can_set_attn_implementation() else None):
        rows = [torch.tensor([sequence], device=model.device) for sequence in sequences]
        return [model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in rows]


def random_sequences(network: Network) -> list[list[int]]:
    """Prompts and the tokens after them, from the middle of the vocabulary: special tokens are at its ends."""
    vocabulary = network.decoder.config.get_text_config().vocab_size
    low, high = vocabulary // 4, max(vocabulary // 4 + 1, 3 * vocabulary // 4)
    stream = torch.Generator().manual_seed(0)
    return [torch.randint(low, high, (length + STEPS,), generator=stream).tolist() for length in PROMPTS]
