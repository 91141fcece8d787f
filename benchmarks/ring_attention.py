"""Ring attention in one process: its numerical error, and the time of one rank's share of the work.

    python benchmarks/ring_attention.py [--tokens 65536] [--size 4] [--stride 2] [--heads 32 --key_heads 8 --dim 128]
    python benchmarks/ring_attention.py --device cpu

The ranks of a ring are threads that pass keys and values to each other, so one GPU is enough; they do the same
computations as processes would, but sending takes no time. First comes a short row of uneven sequences: relative errors
of outputs and gradients against attention in fp64, for the ring and for PyTorch's varlen kernel. The ring should be
about as accurate as the kernel; the script fails if its error is more than twice as large. Then comes one long
sequence: the ring's time for all ranks and the kernel's time for the whole sequence, both divided by the number of
ranks.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from openrlhf.models.attention import segmented_attention
from openrlhf.models.blocks import AttentionResult, Scoring
from openrlhf.models.ring import Share
from openrlhf.models.ring_attention import ring_backward, ring_forward, strides

UNEVEN = (700, 1, 2100, 350, 33, 912)
Attention = Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]  # (q, k, v, gradient) -> (output, dq, dk, dv)


@dataclass(frozen=True)
class Letter:
    """A tensor that a rank waits for, in the queue of a neighbour."""

    box: "Queue[Tensor]"

    def wait(self) -> Tensor:
        return self.box.get()


@dataclass(frozen=True)
class ThreadRing:
    """A rank that is a thread: it sends a tensor by putting it into the queue of the next one."""

    index: int
    size: int
    head_stride: int
    boxes: Sequence["Queue[Tensor]"]

    def pass_on(self, tensor: Tensor) -> Letter:
        self.boxes[(self.index + 1) % self.size].put(tensor.clone())
        return Letter(self.boxes[self.index])


def ring_of(size: int, stride: int) -> Attention:
    def attention(tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        boxes: list[Queue[Tensor]] = [Queue() for _ in range(size)]
        shares: list[Any] = [Share.of(bounds, ThreadRing(i, size, stride, boxes)) for i in range(size)]  # type: ignore[arg-type]
        with ThreadPoolExecutor(size) as ranks:
            parts = list(ranks.map(lambda share: one_rank(tensors, share), shares))
        return [whole([part[number] for part in parts], shares, bounds[-1]) for number in range(4)]

    return attention


@torch.no_grad()
def one_rank(tensors: Sequence[Tensor], share: Any) -> list[Tensor]:
    """Run the forward and backward pass of `RingAttention` for the tokens of one rank."""
    fill = share.bounds[-1] - len(tensors[0])
    query, key, value, gradient = (share.cut(torch.cat([t, t.new_zeros(fill, *t.shape[1:])])) for t in tensors)
    results = [torch.empty_like(part) for part in (query, query, key, value)]
    scoring = Scoring(query.shape[-1] ** -0.5)
    for heads, key_heads in strides(query, key, share.ring.head_stride):
        passed = torch.stack([key[key_heads], value[key_heads]])
        output, lse = ring_forward(query[heads], passed, share, scoring)
        seen = AttentionResult(query[heads], output.to(query.dtype), lse, gradient[heads])
        to_query, (to_key, to_value) = ring_backward(seen, passed, share, scoring)
        found = ((output, heads), (to_query, heads), (to_key, key_heads), (to_value, key_heads))
        for result, (part, where) in zip(results, found, strict=True):
            result[where] = part.to(result.dtype)
    return results


def whole(parts: Sequence[Tensor], shares: Sequence[Any], tokens: int) -> Tensor:
    row = parts[0].new_empty(shares[0].bounds[-1], *parts[0].shape[1:])
    for part, share in zip(parts, shares, strict=True):
        for number, start in enumerate(share.starts(share.ring.index)):
            row[start : start + share.chunk] = part[number * share.chunk : (number + 1) * share.chunk]
    return row[:tokens]


def kernel(tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
    """Run the packed attention of one process: the varlen kernel on CUDA."""
    *inputs, gradient = tensors
    leaves = [part.detach().requires_grad_() for part in inputs]
    query, key, value = (leaf.transpose(0, 1)[None] for leaf in leaves)
    ends = torch.tensor(bounds, dtype=torch.int32, device=query.device)
    longest = max(b - a for a, b in pairwise(bounds))
    module = torch.nn.Module()
    output, _ = segmented_attention(module, query, key, value, None, cu_seq_lens_q=ends, max_length_q=longest)
    output[0].backward(gradient)
    return [output[0].detach(), *(leaf.grad for leaf in leaves)]


def exact(tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
    """Compute each sequence alone in fp64."""
    *inputs, gradient = (part.double() for part in tensors)
    leaves = [part.requires_grad_() for part in inputs]
    outputs = []
    for a, b in pairwise(bounds):
        query, key, value = (leaf[a:b].transpose(0, 1)[None] for leaf in leaves)
        found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1))
    output = torch.cat(outputs)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def make(tokens: int, args: argparse.Namespace) -> list[Tensor]:
    generator = torch.Generator(args.device).manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    heads = (args.heads, args.key_heads, args.key_heads, args.heads)
    options = {"generator": generator, "device": args.device, "dtype": dtype}
    return [torch.randn(tokens, number, args.dim, **options) for number in heads]


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def seconds(attention: Attention, tensors: Sequence[Tensor], bounds: Sequence[int], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        attention(tensors, bounds)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--stride", type=int, default=2, help="--ring_head_stride")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key_heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    lengths = UNEVEN if args.device == "cuda" else tuple(-(-length // 16) for length in UNEVEN)
    bounds = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    ring, row = ring_of(args.size, args.stride), make(bounds[-1], args)
    truth = exact(row, bounds)
    off = {name: errors(method(row, bounds), truth) for name, method in {"ring": ring, "kernel": kernel}.items()}
    print(f"errors over {bounds[-1]} tokens {'output':>10} {'query':>9} {'key':>9} {'value':>9}")
    for name, found in off.items():
        print(f"{name:24} " + " ".join(f"{error:9.1e}" for error in found))
    tokens = args.tokens or (65_536 if args.device == "cuda" else 1024)
    row = make(tokens, args)
    for name, method in {"ring": ring, "kernel": kernel}.items():
        taken = seconds(method, row, [0, tokens], args.repeats)
        print(f"{name:8} {tokens} tokens, one of {args.size} ranks: {1000 * taken / args.size:9.1f} ms")
    if any(ours > 2 * theirs for ours, theirs in zip(*off.values(), strict=True)):
        sys.exit("the ring's error is larger than rounding explains")


if __name__ == "__main__":
    main()
