"""Measure the sender's cost of a weight sync with many receivers.

    python benchmarks/weight_channel_scale.py                                  (70B parameters, 256 receivers)
    python benchmarks/weight_channel_scale.py --billions 671 --bucket_mib 256

The protocol is the real one: authenticated connections over TCP, headers, answers, timeouts. The tensors have the names
and the order of a Llama decoder, but tensors and buckets are 65,536 times smaller, so the number of buckets and their
headers are those of the full model. The receivers are threads of a few processes. NCCL needs GPUs, so a broadcast goes
through shared memory instead; as with NCCL, it ends when every receiver has the data.

*Sender* is the processor time of the sending process; the wall time includes the receivers, which run on the same
machine. Checksums verify the last version.
"""

import argparse
import math
import multiprocessing
import threading
import time
from collections.abc import Iterator
from ctypes import c_int64, c_uint8
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from openrlhf.rollout.channel import Channel
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.weight_receiver import WeightReceiver
from openrlhf.rollout.weight_sender import WeightSender

FORK = multiprocessing.get_context("fork")
SMALLER = 1 << 16  # factor between the tensors of the model and those sent
HIDDEN, INNER, VOCABULARY, KV = 8192, 28672, 128256, 1024  # sizes of Llama 70B
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
VERSIONS = 3
SLOT = 1 << 20  # bytes of a broadcast; the largest tensor is an embedding of 32 KiB
PROCESSES = 4  # processes that run the receivers


def sizes(billions: float) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of elements of each tensor of a model."""
    yield "model.embed_tokens.weight", VOCABULARY * HIDDEN
    layers = round((billions * 1e9 - 2 * VOCABULARY * HIDDEN) / sum(math.prod(shape) for shape in LAYER.values()))
    for layer in range(layers):
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", math.prod(shape)
    yield "lm_head.weight", VOCABULARY * HIDDEN


class SharedBroadcast:
    """Stand-in for a group of NCCL: two slots of bytes, and how many broadcasts each rank has done."""

    def __init__(self, receivers: int) -> None:
        self.counts = np.frombuffer(FORK.RawArray(c_int64, receivers + 1), dtype=np.int64)
        self.slots = torch.frombuffer(FORK.RawArray(c_uint8, 2 * SLOT), dtype=torch.uint8).view(2, SLOT)


@dataclass
class Broadcast:
    """One broadcast, which is complete for the sender once all receivers have taken it."""

    shared: SharedBroadcast
    number: int
    rank: int

    def is_completed(self) -> bool:
        return self.rank > 0 or bool(self.shared.counts[1:].min() > self.number)

    def wait(self) -> None:
        """Do nothing: the caller has waited until it is complete."""


@dataclass
class SharedGroup:
    """One rank's view of the group."""

    shared: SharedBroadcast
    rank: int
    done: int = 0

    def broadcast(self, data: Tensor, _root: int) -> Broadcast:
        number, slot = self.done, self.shared.slots[self.done % 2, : len(data)]
        if self.rank:
            while self.shared.counts[0] <= number:  # the header is here, so the bytes are about to follow
                time.sleep(0.002)
            data.copy_(slot)
        else:
            slot.copy_(data)
        self.done += 1
        self.shared.counts[self.rank] = self.done
        return Broadcast(self.shared, number, self.rank)

    def abort(self) -> None:
        pass


SHARED: list[SharedBroadcast] = []  # inherited by the processes of the receivers


class SimulatedChannel(Channel):
    """A channel for NCCL without GPUs."""

    @property
    def receiving_device(self) -> torch.device:
        return torch.device("cpu")

    def form_group(self, store, rank: int):
        return SharedGroup(SHARED[0], rank)


def receive(pipe: Connection, numbers: range) -> None:
    """Receive all versions, one thread per receiver number; send the joining time and the checksums of the last
    version.
    """
    channel: Channel = pipe.recv()
    found: dict[int, dict[str, int]] = {}

    def run(number: int) -> None:
        receiver = WeightReceiver(channel, number)
        for version in range(VERSIONS):
            last = version == VERSIONS - 1
            weights = receiver.receive(version)
            found[number] = {name: checksum(tensor) if last else 0 for name, tensor in weights}

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send([found[number] for number in numbers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, default=256)
    parser.add_argument("--billions", type=float, default=70, help="parameters of the model, in bf16")
    parser.add_argument("--bucket_mib", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = {name: torch.randn(max(1, size // SMALLER), dtype=torch.bfloat16) for name, size in sizes(args.billions)}
    SHARED.append(SharedBroadcast(args.receivers))
    parts = np.array_split(np.arange(args.receivers), PROCESSES)
    ranges = [range(int(part[0]), int(part[-1]) + 1) for part in parts]
    pipes, processes = [], []
    for numbers in ranges:
        pipe, far = FORK.Pipe()
        process = FORK.Process(target=receive, args=(far, numbers), daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)
    bucket = (args.bucket_mib << 20) // SMALLER
    size = sum(tensor.nbytes for tensor in weights.values())
    print(
        f"{args.billions:g}B parameters, {len(weights)} tensors, about {math.ceil(size / bucket)} buckets of "
        f"{args.bucket_mib} MiB, {args.receivers} receivers"
    )
    sender = WeightSender(
        SimulatedChannel("127.0.0.1", "nccl", args.receivers, bucket_bytes=bucket, timeout=300), torch.device("cpu")
    )
    for pipe in pipes:
        pipe.send(sender.channel)
    checksums: dict[str, int] = {}
    for version in range(VERSIONS):
        last = version == VERSIONS - 1
        wall, own = time.perf_counter(), time.process_time()
        checksums = dict(sender.send(weights.items(), version, verify=last))
        what = ("with joining", "", "with checksums")[version]
        print(
            f"version {version}: sender {time.process_time() - own:.3f} s, "
            f"wall {time.perf_counter() - wall:.3f} s {what}"
        )
    for pipe in pipes:
        assert all(found == checksums for found in pipe.recv()), "checksums differ"
    sender.close()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
