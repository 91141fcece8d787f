"""The processes and devices of a run: which device this process uses, and how it joins the others.

A run is one process, or one per device. `torchrun`, the `deepspeed` launcher or a Ray actor starts the processes and
sets RANK, WORLD_SIZE and LOCAL_RANK; each process then calls `join`, which returns its device. Models are loaded inside
`loading`, so that under ZeRO-3 no process ever holds a whole one. DeepSpeed is imported only if a run needs it.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from openrlhf.config.checks.extras import require
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import TrainingConfig
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import ConfigError
from openrlhf.models.load import choose_dtype
from openrlhf.training.deepspeed_config import half_precision


def uses_deepspeed(config: TrainingConfig) -> bool:
    """Return whether to train with DeepSpeed.

    Several processes need it; a single one needs it only to read a universal checkpoint.
    """
    return world_size() > 1 or config.checkpoints.use_ds_universal_ckpt


def join(config: TrainingConfig) -> torch.device:
    """Choose this process's device, join the distributed group if DeepSpeed is used, and return the device."""
    device = choose_device(config.model.device, config.sharding.local_rank)
    if not uses_deepspeed(config):
        return device
    require("deepspeed", f"training with {world_size()} processes")
    return start_distributed(device)


def choose_device(asked: str, local_rank: int = -1) -> torch.device:
    """Return the device for this process and make it the current one.

    A launcher assigns GPUs by LOCAL_RANK. A single process uses the first GPU, or the CPU if there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch sees no GPU here", try_this="--device cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # stops DeepSpeed, if imported, from logging its own guess
        return torch.device("cpu")
    number = local_rank if local_rank != -1 else int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def start_distributed(device: torch.device) -> torch.device:
    """Join the processes that `deepspeed` or `torchrun` launched, or start a group of one; return `device`."""
    import deepspeed
    from deepspeed import ops

    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # A shared-memory all-reduce for inference: it takes minutes to compile, and training does not call it.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    return device


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loading(config: TrainingConfig, device: torch.device) -> AbstractContextManager[None]:
    """Return a context for loading language models: sharded if ZeRO-3 is used, plain otherwise.

    4-bit models always load plainly.
    """
    if not uses_deepspeed(config) or config.sharding.zero_stage != 3 or config.model.load_in_4bit:
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
