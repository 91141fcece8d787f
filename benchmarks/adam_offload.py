"""Memory and time of --adam_offload: SFT steps of a 1.5B shape (Qwen2.5), optimizer on the GPU or in host memory.

    python benchmarks/adam_offload.py [--layers 28] [--tokens 8192] [--micro_batches 2] [--steps 3]
    python benchmarks/adam_offload.py --device cpu --hidden 64 --layers 2 --vocab 1000 --tokens 512 --row 128

For each mode it prints where the fp32 masters and Adam's moments are, the peak GPU memory, the time of a step, and the
losses, which must agree. A step is `--micro_batches` forward and backward passes and one update; the first is a
warm-up.
"""

import argparse
import gc
import time
from dataclasses import dataclass

import torch
from train_throughput import GIB, add_shape, finish, make_batch, make_network

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.training.local import LocalBackend
from openrlhf.training.objectives import SFT
from openrlhf.types import Batch


@dataclass(frozen=True)
class Measured:
    seconds: float
    losses: list[float]
    on_gpu: int  # bytes of masters and moments
    in_host_memory: int
    peak: int


def measure(args: argparse.Namespace, device: torch.device, batches: list[Batch], *, offload: bool) -> Measured:
    backend = LocalBackend(
        make_network(args, device), OptimizerFlags(), device, learning_rate=1e-5, adam_offload=offload
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], 0.0
    for number in range(args.steps + 1):
        if number == 1:  # after the warm-up
            finish(device)
            start = time.perf_counter()
        losses.append(float(backend.forward_backward(batches, SFT()).losses.sum()))
        backend.optim_step(1.0)
    finish(device)
    seconds = (time.perf_counter() - start) / args.steps
    state = backend.optimizer.state().values()
    gpu, host = (sum(t.numel() * t.element_size() for t in state if t.is_cuda == on_gpu) for on_gpu in (True, False))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Measured(seconds, losses, gpu, host, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, tokens=8192, steps=3)
    parser.add_argument("--micro_batches", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    args = parser.parse_args()
    if args.hidden < 256:  # a toy shape: smaller heads
        args.heads, args.key_heads = 4, 2
    device = torch.device(args.device)
    batches = [make_batch(args)] * args.micro_batches
    found: dict[bool, Measured] = {}
    for offload in (False, True):
        found[offload] = measured = measure(args, device, batches, offload=offload)
        print(
            f"{'--adam_offload' if offload else 'plain':<15} {1000 * measured.seconds:8.1f} ms a step, "
            f"peak {measured.peak / GIB:6.2f} GiB of GPU memory, optimizer {measured.on_gpu / GIB:6.2f} GiB on the GPU "
            f"and {measured.in_host_memory / GIB:6.2f} GiB in host memory, losses "
            + ", ".join(f"{loss:.5f}" for loss in measured.losses)
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    pairs = zip(found[False].losses, found[True].losses, strict=True)
    print(f"largest difference of a loss: {max(abs(one - other) for one, other in pairs):.2e}")


if __name__ == "__main__":
    main()
