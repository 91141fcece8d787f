"""Measure the time to send all weights of a model to an engine's process, and check that they arrived.

    python benchmarks/weight_channel.py                         (a GPU: 1.5B bf16 parameters by ipc; else 50M by tcp)
    python benchmarks/weight_channel.py --transport nccl        (sender on cuda:0, receiver on cuda:1)

The receiver copies each tensor into its own model, as an engine does. The first send forms the group and allocates
the buckets; the last one compares checksums of every tensor on both sides.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from openrlhf.rollout.channel import Channel
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.weight_receiver import IncomingWeights
from openrlhf.rollout.weight_sender import WeightSender

HIDDEN, INNER, VOCABULARY = 1536, 8960, 151936  # of Qwen2.5-1.5B
LAYER = {"q": (HIDDEN, HIDDEN), "kv": (512, HIDDEN), "o": (HIDDEN, HIDDEN), "norm": (HIDDEN,)}
MLP = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}


def make_weights(parameters: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make tensors with the shapes of a decoder, up to this many parameters."""
    weights: dict[str, Tensor] = {}
    if parameters > 2 * VOCABULARY * HIDDEN:
        weights["embed"] = torch.randn(VOCABULARY, HIDDEN, device=device, dtype=dtype)
    layer = 0
    while sum(tensor.numel() for tensor in weights.values()) < parameters:
        for name, shape in (LAYER | MLP).items():
            weights[f"layers.{layer}.{name}"] = torch.randn(shape, device=device, dtype=dtype)
        layer += 1
    return weights


def receive(pipe: Connection, device: torch.device) -> None:
    """Copy the tensors of each `IncomingWeights` into our own, and answer with checksums if requested."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kept: dict[str, Tensor] = {}
    while (asked := pipe.recv()) is not None:
        incoming, verify = asked
        for name, tensor in incoming:
            if name not in kept:
                kept[name] = torch.empty_like(tensor, device=device)
            kept[name].copy_(tensor)
        pipe.send({name: checksum(tensor) for name, tensor in kept.items()} if verify else None)


def sends(sender: WeightSender, weights: dict[str, Tensor], pipe: Connection, repeats: int) -> Iterator[float]:
    for version in range(repeats + 1):
        verify = version == repeats
        pipe.send((IncomingWeights(sender.channel, 0, version), verify))
        start = time.perf_counter()
        sums = sender.send(weights.items(), version, verify=verify)
        arrived = pipe.recv()
        if verify:
            assert arrived == sums, "checksums differ"
        else:
            yield time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--transport", choices=["ipc", "nccl", "tcp"], default="ipc" if on_gpu else "tcp")
    parser.add_argument("--parameters", type=int, default=1_500_000_000 if on_gpu else 50_000_000)
    parser.add_argument("--bucket_mib", type=int, nargs="+", default=[64, 128, 256] if on_gpu else [16, 64])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    here = torch.device("cuda:0" if on_gpu else "cpu")
    there = torch.device("cuda:1") if args.transport == "nccl" else here
    weights = make_weights(args.parameters, here, torch.bfloat16)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    print(f"{len(weights)} tensors, {size / 2**30:.2f} GiB, {args.transport}, {here} to {there}")
    spawn = multiprocessing.get_context("spawn")
    for mib in args.bucket_mib:
        pipe, far = spawn.Pipe()
        process = spawn.Process(target=receive, args=(far, there))
        process.start()
        sender = WeightSender(Channel("127.0.0.1", args.transport, 1, bucket_bytes=mib << 20), here)
        first, *later = sends(sender, weights, pipe, args.repeats)
        best = min(later)
        print(
            f"buckets of {mib:5} MiB: first {first:.3f} s, then {best:.3f} s ({size / 2**30 / best:.1f} GiB/s), equal"
        )
        pipe.send(None)
        process.join()
        sender.close()


if __name__ == "__main__":
    main()
