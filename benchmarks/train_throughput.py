"""SFT throughput of a 1.5B shape (Qwen2.5) with random weights through our backend, objective and optimizer.

    python benchmarks/train_throughput.py [--compile] [--gradient_checkpointing] [--layers 28] [--repeats 3]
    python benchmarks/train_throughput.py --compile --backend fsdp     FSDP2 in a group of one process
    python benchmarks/train_throughput.py --compile auto               as in a long run: compiles if that is faster
    python benchmarks/train_throughput.py --device cpu --hidden 64 --layers 2 --vocab 1000 --tokens 512 --row 128

A micro-batch is rows of `--row` tokens packed to `--tokens`; a step is one micro-batch and one update. Prints tokens/s
as the median over repeats after a warm-up, the share of the matrix-product peak measured here (MFU), and the peak
memory above weights and optimizer. FLOPs are 6 per parameter of a matrix and token, and 12 x layers x hidden x (row /
2) per token for causal attention; recomputation for checkpointing or in the head does not count as useful.
"""

import argparse
import os
import statistics
import time

import numpy as np
import torch
from timeline import Span, kernel_profiler, recorded_kernels, summary
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.config.sections.training import OptimizerFlags, ShardingFlags
from openrlhf.data.collate import pack
from openrlhf.models.attention import choose_attention
from openrlhf.models.forward import Network
from openrlhf.models.load import choose_dtype, recompute_activations
from openrlhf.training.fsdp import FsdpBackend
from openrlhf.training.local import CompilingBackend, LocalBackend, MasterBackend
from openrlhf.training.objectives import SFT
from openrlhf.training.processes import start_processes
from openrlhf.types import Batch, TokenRow

GIB = 1024**3
COMPILE = {"true": True, "false": False, "auto": None}
MANY_STEPS = 1_000_000  # long enough that compilation pays off


def make_network(args: argparse.Namespace, device: torch.device) -> Network:
    """Make a network with random weights, directly on its device."""
    config = Qwen2Config(
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.key_heads,
        vocab_size=args.vocab,
        max_position_embeddings=max(args.row, 1024),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    attention, _ = choose_attention(args.attention, device, packing=True)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=choose_dtype("bf16", device), attn_implementation=attention
        )
    if args.gradient_checkpointing:
        recompute_activations(model, reentrant=False)
    return Network(model)


def make_batch(args: argparse.Namespace) -> Batch:
    random = np.random.default_rng(0)
    lengths = [args.row] * (args.tokens // args.row)
    rows = [
        TokenRow(random.integers(0, args.vocab, length).astype(np.int32), np.ones(length, dtype=bool))
        for length in lengths
    ]
    return pack(rows)


def matmul_flops(device: torch.device, size: int) -> float:
    """Return the FLOP/s of the fastest of several square matrix products in the training dtype."""
    left, right = (torch.randn(size, size, device=device, dtype=choose_dtype("bf16", device)) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        finish(device)
        start = time.perf_counter()
        for _ in range(5):
            left @ right
        finish(device)
        best = min(best, (time.perf_counter() - start) / 5)
    return 2 * size**3 / best


def useful_flops(network: Network, args: argparse.Namespace) -> float:
    """Return the FLOPs of a forward and backward pass per token."""
    matrices = sum(parameter.numel() for parameter in network.parameters() if parameter.ndim == 2)  # tied: once
    return 6 * matrices + 12 * args.layers * args.hidden * args.row / 2


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(backend: MasterBackend, batch: Batch, args: argparse.Namespace) -> list[float]:
    """Return the seconds per step of each repeat, after a warm-up."""

    def step() -> float:
        loss = backend.forward_backward([batch], SFT()).losses.sum()
        backend.optim_step(1.0)
        return float(loss)

    first = step()
    decision = backend.compilation if isinstance(backend, CompilingBackend) else None
    backend.steps_left = MANY_STEPS
    while decision is not None and not decision.finished:
        step()
    finish(backend.device)
    if backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    times = []
    for _ in range(args.repeats):
        finish(backend.device)
        start = time.perf_counter()
        for _ in range(args.steps):
            last = step()
        finish(backend.device)
        times.append((time.perf_counter() - start) / args.steps)
    print(f"loss {first:.3f} -> {last:.3f} on one repeated batch")
    return times


def profile_step(backend: MasterBackend, batch: Batch, count: int) -> str:
    """Return a table of the longest kernels of one step."""
    with kernel_profiler() as profiler:
        began = time.perf_counter()
        backend.forward_backward([batch], SFT())
        backend.optim_step(1.0)
        finish(backend.device)
        seconds = time.perf_counter() - began
    return summary(recorded_kernels(profiler), [Span("step", 0.0, seconds)], count)


def add_shape(parser: argparse.ArgumentParser, *, tokens: int, steps: int) -> None:
    """Add the flags for the shape of a model and of a step, which other benchmarks share."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("hidden", 1536), ("mlp", 8960), ("layers", 28), ("heads", 12), ("key_heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("vocab", 151_936), ("tokens", tokens), ("row", 1024), ("steps", steps)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="auto")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, tokens=16_384, steps=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--compile",
        nargs="?",
        const="true",
        default="false",
        choices=list(COMPILE),
        help="compile each decoder layer; auto: decide like a run without --deepcompile",
    )
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--adam_offload", action="store_true")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="profile a step and list its N longest kernels"
    )
    parser.add_argument("--backend", choices=("local", "fsdp"), default="local")
    args = parser.parse_args()
    args.compile = COMPILE[args.compile]
    if args.hidden < 256:  # a toy shape: smaller heads
        args.heads, args.key_heads = 4, 2
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    peak = matmul_flops(device, 8192 if device.type == "cuda" else 1024)
    network = make_network(args, device)
    count = sum(parameter.numel() for parameter in network.parameters())
    backend: MasterBackend
    if args.backend == "fsdp":
        sharding = ShardingFlags(adam_offload=args.adam_offload, deepcompile=bool(args.compile))
        backend = FsdpBackend(network, OptimizerFlags(), sharding, start_processes(device), learning_rate=1e-5)
    else:
        automatic = args.compile is None
        backend = (CompilingBackend if automatic else LocalBackend)(
            network,
            OptimizerFlags(),
            device,
            learning_rate=1e-5,
            adam_offload=args.adam_offload,
            compile_layers=bool(args.compile),
        )
    batch = make_batch(args)
    times = measure(backend, batch, args)
    seconds, tokens = statistics.median(times), batch.input_ids.numel()
    rate = tokens / seconds
    how = [args.backend, *([] if args.compile is False else ["compile" if args.compile else "compile auto"])]
    how += [name for name in ("gradient_checkpointing", "adam_offload") if vars(args)[name]]
    print(
        f"{count / 1e9:.3f}B parameters, {next(network.parameters()).dtype}, {tokens} tokens in rows of {args.row}, "
        f"{network.decoder.config._attn_implementation}, {', '.join(how)}"
    )
    print(f"{rate:,.0f} tokens/s, {1000 * seconds:.1f} ms a step, spread {1000 * (max(times) - min(times)):.1f} ms")
    print(f"MFU {100 * rate * useful_flops(network, args) / peak:.1f}% of {peak / 1e12:.2f} TFLOP/s")
    if device.type == "cuda":
        kept = [*network.parameters(), *backend.optimizer.state().values()]
        held = sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor.is_cuda)
        most = torch.cuda.max_memory_allocated()
        print(f"peak {most / GIB:.1f} GiB, {(most - held) / GIB:.1f} GiB over weights and optimizer")
    if args.kernels:
        print(profile_step(backend, batch, args.kernels))


if __name__ == "__main__":
    main()
