"""Training with shared prompts computed once: time, memory and agreement with the unshared computation.

    python benchmarks/shared_prefixes.py                                W1: 128 + 512 tokens, 8 samples per prompt
    python benchmarks/shared_prefixes.py --prompt 2048 --groups 1       W4: long prompts
    python benchmarks/shared_prefixes.py --device cpu --hidden 64 --layers 2 --vocab 1000 --prompt 32 --response 16

Trains Qwen2.5's 1.5B shape with random weights on one micro-batch of `--groups` prompts with `--samples` responses
each, whose targets are the responses. A step is one micro-batch and one update.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from train_throughput import GIB, add_shape, finish, make_network, measure

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import pack
from openrlhf.models.forward import LogProbs
from openrlhf.training.local import LocalBackend
from openrlhf.types import Batch, TokenRow


def make_groups(args: argparse.Namespace) -> Batch:
    """Make a packed micro-batch of prompts with several responses each."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(args.groups):
        prompt = random.integers(0, args.vocab, args.prompt)
        for _ in range(args.samples):
            ids = np.concatenate([prompt, random.integers(0, args.vocab, args.response)]).astype(np.int32)
            rows.append(TokenRow(ids, np.arange(len(ids)) >= args.prompt))
    return pack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, tokens=0, steps=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--groups", type=int, default=3, help="prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer")
    args = parser.parse_args()
    if args.hidden < 256:  # a toy shape: smaller heads
        args.heads, args.key_heads = 4, 2
    args.row, args.gradient_checkpointing = args.prompt + args.response, False
    device, batch = torch.device(args.device), make_groups(args)
    assert batch.prefixes is not None
    print(f"{batch.input_ids.numel():,} tokens, {len(batch.prefixes.kept):,} computed with shared prompts")
    network = make_network(args, device)
    here, gradients, found = batch.to(device), [], []
    for shares in (False, True):
        network.shares_prefixes = shares
        network.zero_grad()
        log_probs = network(here, LogProbs).log_probs
        (log_probs.sum() / here.target_mask.sum()).backward()
        found.append(log_probs.detach()[here.target_mask])
        gradients.append([p.grad.float().cpu() for p in network.parameters() if p.grad is not None])
        network.zero_grad()
    worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*gradients, strict=True) if a.norm() > 0)
    print(f"log-probs differ by {float((found[0] - found[1]).abs().mean()):.2e} in the mean, gradients by {worst:.2e}")
    backend = LocalBackend(network, OptimizerFlags(), device, learning_rate=1e-5, compile_layers=args.compile)
    seconds = {}
    for shares in (False, True):
        network.shares_prefixes = shares
        seconds[shares] = float(np.median(measure(backend, batch if shares else replace(batch, prefixes=None), args)))
        memory = f", peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB" if device.type == "cuda" else ""
        print(f"{'shared' if shares else 'unshared'}: {seconds[shares]:.3f} s a step{memory}")
    finish(device)
    print(f"{seconds[False] / seconds[True]:.2f}x")


if __name__ == "__main__":
    main()
