"""The processes and devices of a run: which device this process uses, and how it joins the others.

A run is one process, or one per device. `torchrun`, the `deepspeed` launcher or a Ray actor starts the processes and
sets RANK, WORLD_SIZE and LOCAL_RANK; each process then calls `join`, which returns its device. Models are loaded inside
`loading`, so that under ZeRO-3 no process ever holds a full model. DeepSpeed is imported only if a run needs it.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from transformers.utils.logging import disable_progress_bar

from openrlhf.config.checks.extras import require
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import TrainingConfig
from openrlhf.config.runtime import backend_of
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import BackendError, ConfigError
from openrlhf.models.compiler_cache import keep_compiled_code_private
from openrlhf.models.load import choose_dtype
from openrlhf.monitor import say
from openrlhf.signals import end_at_first_signal
from openrlhf.training.deepspeed_config import half_precision


def training_backend(config: TrainingConfig) -> Literal["local", "deepspeed", "fsdp"]:
    """Return the library that trains the models of this process."""
    return backend_of(config, world_size())


def defers_weights(config: TrainingConfig) -> bool:
    """Return whether models are loaded without weights, which FSDP reads layer by layer as it shards them."""
    return training_backend(config) == "fsdp"


def join(config: TrainingConfig) -> torch.device:
    """Choose this process's device, join the other processes if the backend needs them, and return the device."""
    device = choose_device(config.model.device, config.sharding.local_rank)
    match training_backend(config):
        case "deepspeed":
            require("deepspeed", f"training with {world_size()} processes")
            return start_distributed(device)
        case "fsdp":
            return start_processes(device)
    return device


def agree(number: int, device: torch.device) -> int:
    """Broadcast the number of process 0 to all processes of the run, and return it."""
    if not dist.is_initialized():
        return number
    shared = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared)


def choose_device(asked: str, local_rank: int = -1) -> torch.device:
    """Return the device for this process and make it the current one.

    A launcher assigns GPUs by LOCAL_RANK. A single process uses the first GPU, or the CPU if there is none.
    """
    keep_compiled_code_private()
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, but PyTorch finds none", try_this="--device cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed guesses the device and logs the guess
        return torch.device("cpu")
    number = local_rank if local_rank != -1 else int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def enter_folder(folder: str) -> None:
    """Disable progress bars, and change to the driver's working folder if it exists, so that relative paths work."""
    disable_progress_bar()
    with suppress(FileNotFoundError):
        os.chdir(folder)


def start_processes(device: torch.device, timeout: timedelta = default_pg_timeout) -> torch.device:
    """Join the processes that `deepspeed` or `torchrun` launched, or start a group of one; return `device`."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not dist.is_initialized():
        # Bind the device as DeepSpeed does, so that NCCL can split communicators; a group of one needs no split.
        bound = device if device.type == "cuda" and world_size() > 1 else None
        join_process_group(collectives_of(device), timeout, bound)
    return device


def start_distributed(device: torch.device) -> torch.device:
    """Like `start_processes`, but for DeepSpeed; return `device`."""
    import deepspeed
    from deepspeed import ops
    from deepspeed.constants import default_pg_timeout

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # This shared-memory all-reduce is for inference. It takes minutes to compile, and training does not use it.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    start_processes(device, default_pg_timeout)
    deepspeed.init_distributed(collectives_of(device), verbose=False)  # adopts the group
    return device


def collectives_of(device: torch.device) -> str:
    """Return the library that communicates between devices of this type."""
    return "nccl" if device.type == "cuda" else "gloo"


# If another process dies, the launcher sends SIGTERM to this one, whose wait in C++ no exception can interrupt.
@end_at_first_signal()
def join_process_group(backend: str, timeout: timedelta, device: torch.device | None = None) -> None:
    """Join torch's default process group through a store that listens on MASTER_ADDR only.

    By default, torch listens on all interfaces. Under `torchrun`, the launcher already serves the store.
    """
    rank, size = int(os.environ["RANK"]), world_size()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    use_interface_of(address)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout, device_id=device)
        return
    listening = listen_on(address, port).detach() if rank == 0 else None
    store = dist.TCPStore(address, port, size, rank == 0, timeout, master_listen_fd=listening)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)


def listen_on(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address, or on all addresses if it is not an address of this machine."""
    family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    # torchrun and our Ray actors set LOCAL_WORLD_SIZE, the deepspeed launcher sets LOCAL_SIZE.
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(world_size())
    spans_machines = here != str(world_size())
    try:
        if spans_machines and ipaddress.ip_address(found[0]).is_loopback:  # others resolve the name differently
            raise OSError(errno.EADDRNOTAVAIL, "a loopback address")
        return socket.create_server(found[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise BackendError(
                f"the first process cannot listen on MASTER_ADDR {address}, MASTER_PORT {port}: {error.strerror}",
                try_this="another --master_port for the launcher",
            ) from error
    say(f"MASTER_ADDR {address} is not an address of this machine: listening on all of its addresses")
    return socket.create_server(("", port), backlog=1024)


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface that routes to this address, not the one that the host name resolves to."""
    import psutil

    # Connecting a datagram socket selects the route without sending anything.
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own_address = str(probe.getsockname()[0])
    except OSError:  # torch will report the invalid address
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own_address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def loading(config: TrainingConfig, device: torch.device) -> AbstractContextManager[None]:
    """Return a context for loading language models: sharded if ZeRO-3 is used, plain otherwise.

    4-bit models are never sharded.
    """
    if training_backend(config) != "deepspeed" or config.sharding.zero_stage != 3 or config.model.load_in_4bit:
        return nullcontext()
    return sharded_loading(config.sharding, choose_dtype(config.model.param_dtype, device))


@contextmanager
def sharded_loading(sharding: ShardingFlags, dtype: torch.dtype) -> Iterator[None]:
    """Make `from_pretrained` load only this rank's shard of a ZeRO-3 model."""
    from transformers.integrations import HfDeepSpeedConfig

    zero: dict[str, object] = {"stage": 3}
    if sharding.zpg > 1:
        zero["zero_hpz_partition_size"] = sharding.zpg
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **half_precision(dtype)}
    alive = HfDeepSpeedConfig(config)  # Transformers keeps only a weak reference to it
    try:
        yield
    finally:
        del alive
