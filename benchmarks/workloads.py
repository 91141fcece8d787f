"""The four workloads W1 to W4 on which this package is compared with its peers.

A workload is data: how many prompts and samples, how long, and which models take part. Every driver in `peers/` runs
the same ones, with the model, prompts and rewards of `workload_files.py`. All use the 1.5B shape of Qwen2.5 with random
weights, in bf16, and one optimizer step over all samples of a rollout.

    W1  GRPO, 64 prompts of 128 tokens x 8 samples of exactly 512 tokens
    W2  as W1, with responses of 32 to 2,048 tokens, 400 on average
    W3  as W1, but PPO: with a critic, a reference and a reward model of the same shape
    W4  GRPO, 16 prompts of 2,048 tokens x 8 samples of 512 tokens: as many tokens to train on as in W1

`w1_7b` is W1 with the 7B shape and a quarter of the samples; it has no drivers for peers (`rl_step.py --shape 7b`).

`tiny=True` selects a scale at which a workload runs on two CPU cores in seconds, to try the drivers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

STRIDE = 197  # a prime, so that multiples of it visit each index once (unless it divides the number of samples)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen2 model, named as in its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class Workload:
    """One step of reinforcement learning, as every driver runs it."""

    name: str
    prompts: int
    samples: int  # tokens of each prompt
    prompt_length: int  # in tokens
    lengths: tuple[int, ...]  # tokens of each response, prompt by prompt
    shape: ModelShape
    micro_batch_tokens: int
    has_critic: bool = False  # PPO with a critic, a reference and a reward model; otherwise GRPO without any of them

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Number of tokens in the longest response."""
        return max(self.lengths)

    @property
    def is_uniform(self) -> bool:
        """True if all responses have the same length, so that one sampling parameter fits all."""
        return len(set(self.lengths)) == 1

    @property
    def context(self) -> int:
        """Number of tokens in the longest sample, including its prompt."""
        return self.prompt_length + self.longest

    @property
    def tokens(self) -> int:
        """Number of tokens that a step trains on, including prompts."""
        return self.num_samples * self.prompt_length + sum(self.lengths)

    @property
    def micro_batch_samples(self) -> int:
        """Number of samples in a micro-batch, for peers that count samples: a power of two, of padded samples."""
        fitting = max(1, self.micro_batch_tokens // self.context)
        return min(self.num_samples, 2 ** (fitting.bit_length() - 1))


def response_lengths(count: int, *, shortest: int, longest: int, mean: int) -> tuple[int, ...]:
    """Return lengths between two limits, both of which occur, with exactly this mean: many short ones and a long tail.

    The i-th shortest is shortest + (longest - shortest) * (i / (count - 1)) ** power. The power that gives the mean is
    found by bisection. Any remainder from rounding is added to the lengths in the middle, one token each. A stride then
    spreads long and short responses over the prompts.
    """

    def lengths_for(power: float) -> list[int]:
        return [shortest + int((longest - shortest) * (place / (count - 1)) ** power) for place in range(count)]

    low, high = 0.0, 64.0  # a larger power makes shorter responses
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths_for(middle)) > count * mean else (low, middle)
    found = lengths_for(high)  # never above the mean
    for place in range(count * mean - sum(found)):
        found[1 + place % (count - 2)] += 1
    return tuple(found[place * STRIDE % count] for place in range(count))


QWEN_1_5B = ModelShape(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151_936,
)
QWEN_7B = ModelShape(
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152_064,
    tie_word_embeddings=False,
)
TINY = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=1000,
)


def w1() -> Workload:
    return Workload(
        "W1",
        prompts=64,
        samples=8,
        prompt_length=128,
        lengths=(512,) * 512,
        shape=QWEN_1_5B,
        micro_batch_tokens=16_640,  # 26 samples
    )


def w2() -> Workload:
    return replace(w1(), name="W2", lengths=response_lengths(512, shortest=32, longest=2048, mean=400))


def w3() -> Workload:
    return replace(w1(), name="W3", has_critic=True)


def w4() -> Workload:
    return replace(w1(), name="W4", prompts=16, prompt_length=2048, lengths=(512,) * 128)


def w1_7b() -> Workload:
    return replace(
        w1(),
        name="W1 7B",
        prompts=32,
        samples=4,
        lengths=(512,) * 128,
        shape=QWEN_7B,
        micro_batch_tokens=4160,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"W1": w1, "W2": w2, "W3": w3, "W4": w4}


def find_workload(name: str, *, tiny: bool = False) -> Workload:
    """Return a workload at full scale, or with 4 prompts x 2 samples of a tiny model."""
    full = WORKLOADS[name]()
    if not tiny:
        return full
    lengths = (16,) * 8 if full.is_uniform else response_lengths(8, shortest=4, longest=32, mean=12)
    return replace(
        full,
        prompts=4,
        samples=2,
        prompt_length=full.prompt_length // 8,
        lengths=lengths,
        shape=TINY,
        micro_batch_tokens=1024,
    )
