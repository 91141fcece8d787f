"""Several vLLM engines on the GPU of a run in one process (--vllm_engines_per_gpu): how many, and how they are used.

With hundreds of sequences and a small model, vLLM spends more time in its Python scheduler than the GPU spends on the
model. Two engine processes halve the Python work of each, and their kernels overlap: 64 x 8 samples of 512 tokens with
1.5B parameters took 4.5 s instead of 6.1 s on an H200 under CUDA MPS, and 6.1 s instead of 10.3 s next to a slower
processor. `engines_per_gpu` chooses the number, `open_engines` starts the processes, with MPS on a GPU, and
`LocalPolicy` sends them the policy's weights.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import uses_vllm
from openrlhf.errors import RolloutError
from openrlhf.models.load import choose_dtype
from openrlhf.monitor import say
from openrlhf.plan.shapes import read_shape
from openrlhf.rl.engines import engine_spec, load_engine
from openrlhf.rl.models import Models
from openrlhf.rollout.channel import Channel
from openrlhf.rollout.engine import Checksums
from openrlhf.rollout.engine_group import EngineGroup
from openrlhf.rollout.engine_process import open_engine_processes
from openrlhf.rollout.group_sync import CHANNEL_TIMEOUT, LOOPBACK, Receiving
from openrlhf.rollout.ipc import check_allocator
from openrlhf.rollout.mps import start_mps
from openrlhf.rollout.vllm import preload
from openrlhf.rollout.weight_sender import WeightSender

MIN_SAMPLES = 256  # per rollout; with fewer, the Python scheduler of one engine is not the bottleneck
AUTOMATIC = 2  # engines; three take as long (docs/performance.md), because the GPU is then the limit
MIN_CORES = 4  # one for each engine, and some for the trainer, rewards and agents
MAX_WEIGHTS = 0.5  # share of the engines' memory for all copies; the rest is for KV caches and CUDA graphs
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of an engine's cache on a CPU


@dataclass(frozen=True)
class RolloutLoad:
    """Sizes of a rollout, the model and the GPU, from which `automatic_count` chooses."""

    samples: int  # samples per rollout
    weights: int  # bytes of the model
    memory: int  # bytes of GPU memory for the engines
    cores: int


def automatic_count(load: RolloutLoad) -> int:
    """Return 2 if one engine's scheduler would be the bottleneck, and the GPU has room for a second copy; else 1."""
    pays = load.samples >= MIN_SAMPLES and load.cores >= MIN_CORES
    return AUTOMATIC if pays and AUTOMATIC * load.weights <= MAX_WEIGHTS * load.memory else 1


def engines_per_gpu(config: RLConfig) -> int:
    """Return the number of engines: --vllm_engines_per_gpu or, if that is 0, `automatic_count` on a GPU.

    Several engines were measured to be faster only under MPS. A deterministic run has one engine: with two, timing
    decides which of them answers a request, and with it the rounding of a batch.
    """
    if not uses_vllm(config):
        return 1
    given = config.engines.vllm_engines_per_gpu
    if given or not has_gpu(config) or config.batches.full_determinism:
        return given or 1
    memory, weights = shareable_memory(), weight_bytes(config)
    if memory is None or weights is None:
        return 1
    try:
        check_allocator()
    except RolloutError:  # weights cannot be sent to other processes
        return 1
    share = int(config.engines.vllm_gpu_memory_utilization * memory)
    count = automatic_count(
        RolloutLoad(config.rollout.samples_per_rollout, weights, share, len(os.sched_getaffinity(0)))
    )
    if count > 1 and start_mps().problem:
        return 1
    if count > 1:
        say(
            f"{count} vLLM engines share the GPU: with {config.rollout.samples_per_rollout} samples per rollout, one "
            "would be limited by its Python scheduler. --vllm_engines_per_gpu 1 starts one"
        )
    return count


def has_gpu(config: RLConfig) -> bool:
    return config.model.device != "cpu" and torch.cuda.device_count() > 0  # counting does not initialise CUDA


def shareable_memory() -> int | None:
    """Return the bytes of the smallest GPU; None if nvidia-smi does not know, or if processes cannot share all GPUs."""
    command = ["nvidia-smi", "--query-gpu=memory.total,compute_mode,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return smallest_shareable(shown)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def smallest_shareable(shown: str) -> int | None:
    """Return the bytes of the smallest GPU in nvidia-smi's lines `MiB, compute mode, MIG mode`.

    None if a GPU allows only one process, as clusters often set it, or is divided into MIG instances, whose memory
    nvidia-smi does not show here.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in shown.strip().splitlines()]
    if any(mode != "Default" or mig == "Enabled" for _, mode, mig in rows):
        return None
    return min(int(size) for size, _, _ in rows) << 20


def weight_bytes(config: RLConfig) -> int | None:
    """Return the size of the policy's weights in an engine, from its config.json; None if unknown."""
    try:
        shape = read_shape(str(config.model.pretrain), config.model)
    except Exception:  # noqa: BLE001 - a model's own code may raise anything; a guess must not end the run
        return None
    return int(choose_dtype(config.model.param_dtype, torch.device("cuda")).itemsize * shape.parameters)


def gpu_share(count: int) -> Mapping[str, str]:
    """Return the variables that let engines run side by side on a GPU; say why if they cannot."""
    check_allocator()
    clients = start_mps()
    if clients.problem:
        say(f"{count} vLLM engines take turns on the GPU, which is slower than CUDA MPS: {clients.problem}")
    return clients.variables


@asynccontextmanager
async def open_engines(config: RLConfig, count: int, device: torch.device) -> AsyncIterator[EngineGroup]:
    """Start `count` vLLM engines in separate processes, which share the device and its memory."""
    spec, flags = engine_spec(config).divided(count), config.engines
    async with open_engine_processes(
        count,
        lambda number: partial(load_engine, spec, number, os.getcwd()),
        environment=gpu_share(count) if device.type == "cuda" else cpu_share(count, os.environ),
        timeout=flags.engine_timeout,
        max_restarts=flags.max_restarts,
        preload=preload,
        in_turn=device.type == "cuda",  # at startup, vLLM measures how much memory its own model takes
    ) as group:
        yield group


def cpu_share(count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give each of several engines its part of the cores and of a given KV cache."""
    shared = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    if KV_SPACE in environ:
        shared[KV_SPACE] = str(max(1, int(environ[KV_SPACE]) // count))
    return shared


@dataclass
class LocalPolicy:
    """The policy in this process, as the sender of weights to engine processes.

    On a GPU the engines read the weights from this process's memory, otherwise they get them through a local socket.
    """

    models: Models
    device: torch.device
    updating: asyncio.Lock  # held while a thread changes the weights
    sender: WeightSender | None = None

    async def open_channels(self, machines: Mapping[int, Sequence[str]]) -> list[Receiving]:
        if self.sender is not None:
            self.sender.close()
        transport = "ipc" if self.device.type == "cuda" else "tcp"
        channel = Channel(LOOPBACK, transport, len(machines), timeout=CHANNEL_TIMEOUT)
        self.sender = WeightSender(channel, self.device)
        return [Receiving(self.sender.channel, number) for number in range(len(machines))]

    async def send(self, version: int, *, verify: bool) -> Checksums:
        """Send the weights in a thread, because the event loop must keep handling the engines' answers."""
        sender = self.sender
        assert sender is not None, "open_channels comes first"
        async with self.updating:
            return await asyncio.to_thread(lambda: sender.send(self.models.weights(), version, verify=verify))

    async def rest(self) -> None:
        self.models.rest()

    async def free_cache(self) -> None:
        self.models.free_cache()

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
