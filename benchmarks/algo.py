"""Time the mathematics of an RL step on a CPU, against naive loops over samples and tokens with the same results.

    python benchmarks/algo.py [--samples 1024 --tokens 4096] [--repeats 5]

Advantages, KL and policy loss (forward and backward) run over samples x tokens; each line is the median of several
runs. The naive column is measured on the fraction of the samples that the table states, and scaled up. Below it is
length balancing at growing sizes, best of several runs: twice the samples should take about twice the time.
"""

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from openrlhf.algo.advantages import discounted_returns, gae, normalize
from openrlhf.algo.balance import first_fit, interleave, karmarkar_karp
from openrlhf.algo.kl import kl_penalty
from openrlhf.algo.policy_loss import policy_loss
from openrlhf.algo.shaping import group_norm

NAIVE_SAMPLES = 4  # a Python loop over 4M tokens would take minutes
GAMMA, LAMBD = 0.99, 0.95


@dataclass(frozen=True)
class Rollout:
    """Random tensors with the shape of a rollout; a fifth of the tokens comes from the environment."""

    log_probs: Tensor  # [samples, tokens], like the next ones
    old_log_probs: Tensor
    values: Tensor
    token_rewards: Tensor
    advantages: Tensor
    action_mask: Tensor
    rewards: Tensor  # [samples]
    group_ids: Tensor  # [samples]

    def head(self, samples: int) -> "Rollout":
        return Rollout(**{name: tensor[:samples] for name, tensor in vars(self).items()})


def make_rollout(samples: int, tokens: int) -> Rollout:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(samples, tokens, generator=generator) for _ in range(5)]
    return Rollout(
        log_probs=-1 + 0.1 * noise[0],
        old_log_probs=-1 + 0.1 * noise[1],
        values=noise[2],
        token_rewards=noise[3],
        advantages=noise[4],
        action_mask=torch.rand(samples, tokens, generator=generator) < 0.8,
        rewards=torch.randn(samples, generator=generator),
        group_ids=torch.arange(samples) % max(samples // 8, 1),
    )


def policy_step(batch: Rollout) -> None:
    log_probs = batch.log_probs.clone().requires_grad_()
    denominator = batch.action_mask.sum()
    loss, _ = policy_loss(log_probs, batch.old_log_probs, batch.advantages, batch.action_mask, denominator)
    loss.backward()


def naive_scan(batch: Rollout, gamma: float, lambd: float, values: list[list[float]]) -> list[list[float]]:
    rewards, mask = batch.token_rewards.tolist(), batch.action_mask.tolist()
    result = []
    for row_rewards, row_values, row_mask in zip(rewards, values, mask, strict=True):
        advantage = next_value = 0.0
        row = [0.0] * len(row_mask)
        for t in reversed(range(len(row_mask))):
            if row_mask[t]:
                delta = row_rewards[t] + gamma * next_value - row_values[t]
                advantage = delta + gamma * lambd * advantage
                next_value, row[t] = row_values[t], advantage
        result.append(row)
    return result


def naive_gae(batch: Rollout) -> None:
    naive_scan(batch, GAMMA, LAMBD, batch.values.tolist())


def naive_returns(batch: Rollout, gamma: float) -> None:
    naive_scan(batch, gamma, 1.0, torch.zeros_like(batch.values).tolist())


def naive_normalize(batch: Rollout) -> None:
    pairs = zip(batch.advantages.flatten().tolist(), batch.action_mask.flatten().tolist(), strict=True)
    kept = [value for value, acts in pairs if acts]
    mean = sum(kept) / len(kept)
    scale = (sum((value - mean) ** 2 for value in kept) / len(kept)) ** -0.5
    [(value - mean) * scale for value in kept]


def naive_group_norm(batch: Rollout) -> None:
    ids, rewards = batch.group_ids.tolist(), batch.rewards.tolist()
    for i, reward in enumerate(rewards):
        group = [other for other, j in zip(rewards, ids, strict=True) if j == ids[i]]
        (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-9 if len(group) > 1 else 1.0)


def naive_kl(batch: Rollout) -> None:
    for row, ref_row in zip(batch.log_probs.tolist(), batch.old_log_probs.tolist(), strict=True):
        for log_prob, ref in zip(row, ref_row, strict=True):
            ratio = log_prob - ref
            min(max(math.exp(-ratio) - 1 + ratio, -10.0), 10.0)


def naive_policy_step(batch: Rollout) -> None:
    """Compute the same loss with a hand-written gradient; an autograd graph per token would be even slower."""
    columns = (batch.log_probs, batch.old_log_probs, batch.advantages, batch.action_mask)
    for log_probs, old_log_probs, advantages, mask in zip(*(column.tolist() for column in columns), strict=True):
        loss, gradient = 0.0, [0.0] * len(mask)
        for t, acts in enumerate(mask):
            if acts:
                ratio = math.exp(log_probs[t] - old_log_probs[t])
                plain = ratio * advantages[t]
                clipped = min(max(ratio, 0.8), 1.2) * advantages[t]
                loss -= min(plain, clipped)
                gradient[t] = -plain if plain <= clipped else 0.0


CASES: dict[str, tuple[Callable[[Rollout], object], Callable[[Rollout], None]]] = {
    "gae": (lambda b: gae(b.token_rewards, b.values, b.action_mask, GAMMA, LAMBD), naive_gae),
    "returns, gamma 0.99": (
        lambda b: discounted_returns(b.token_rewards, b.action_mask, GAMMA),
        lambda b: naive_returns(b, GAMMA),
    ),
    "returns, gamma 1": (
        lambda b: discounted_returns(b.token_rewards, b.action_mask, 1.0),
        lambda b: naive_returns(b, 1.0),
    ),
    "normalisation": (lambda b: normalize(b.advantages, b.action_mask), naive_normalize),
    "KL penalty, k3": (lambda b: kl_penalty(b.log_probs, b.old_log_probs, b.action_mask, "k3"), naive_kl),
    "policy loss + backward": (policy_step, naive_policy_step),
}


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return times


def median_ms(work: Callable[[], object], repeats: int) -> float:
    return statistics.median(times_ms(work, repeats))


def time_tensors(rollout: Rollout, repeats: int) -> None:
    samples, tokens = rollout.action_mask.shape
    few = min(NAIVE_SAMPLES, samples)
    print(f"{samples} samples x {tokens} tokens = {samples * tokens / 1e6:.1f}M, {torch.get_num_threads()} threads")
    print(f"{'':24} {'ms':>9} {'naive ms':>10} {'faster':>8}   naive measured on")
    lines = [
        (name, median_ms(lambda fast=fast: fast(rollout), repeats), naive, rollout.head(few))
        for name, (fast, naive) in CASES.items()
    ]
    shaping = median_ms(lambda: group_norm(rollout.rewards, rollout.group_ids), repeats)
    lines.append(("group_norm, groups of 8", shaping, naive_group_norm, rollout))
    for name, fast_ms, naive, part in lines:
        measured = len(part.rewards)
        naive_ms = median_ms(lambda naive=naive, part=part: naive(part), 3) * samples / measured
        scaled = "all samples" if measured == samples else f"{measured} of {samples} samples, scaled"
        print(f"{name:24} {fast_ms:9.1f} {naive_ms:10.0f} {naive_ms / fast_ms:7.0f}x   {scaled}")


def time_balance(samples: int, tokens: int, repeats: int) -> None:
    functions: dict[str, Callable[[list[int]], object]] = {
        "first_fit": lambda lengths: first_fit(lengths, 4 * tokens),
        "karmarkar_karp, n/4": lambda lengths: karmarkar_karp(lengths, max(len(lengths) // 4, 1)),
        "interleave, 8 ranks": lambda lengths: interleave(lengths, 8),
    }
    sizes = [4 * samples, 8 * samples, 16 * samples]
    print(f"\n{'balance, best ms':24}" + "".join(f"{f'n = {size}':>12}" for size in sizes) + "   growth per doubling")
    for name, function in functions.items():
        times = []
        for size in sizes:
            lengths = random.Random(0).choices(range(1, tokens + 1), k=size)
            times.append(min(times_ms(lambda function=function, lengths=lengths: function(lengths), repeats)))
        growth = ", ".join(f"{after / before:.1f}x" for before, after in pairwise(times))
        print(f"{name:24}" + "".join(f"{value:12.1f}" for value in times) + f"   {growth}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    time_tensors(make_rollout(args.samples, args.tokens), args.repeats)
    time_balance(args.samples, args.tokens, args.repeats)


if __name__ == "__main__":
    main()
