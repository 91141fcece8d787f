"""Start-up under DeepSpeed: join the other processes of a launch, and load a model directly into shards."""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed import ops
from transformers.integrations import HfDeepSpeedConfig

from openrlhf.config.sections.training import ShardingFlags


def start_distributed(device: torch.device) -> torch.device:
    """Join the processes that `deepspeed` or `torchrun` launched, or start a group of one; return `device`."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # A shared-memory all-reduce for inference: it takes minutes to compile, and training does not call it.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def sharded_loading(sharding: ShardingFlags, dtype: torch.dtype) -> Iterator[None]:
    """Make `from_pretrained` load only this rank's shard of a ZeRO-3 model; no effect at other stages."""
    if sharding.zero_stage != 3:
        yield
        return
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if dtype in (torch.bfloat16, torch.float16):
        config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    if sharding.zpg > 1:
        config["zero_optimization"]["zero_hpz_partition_size"] = sharding.zpg
    alive = HfDeepSpeedConfig(config)  # Transformers keeps only a weak reference to it
    try:
        yield
    finally:
        del alive
