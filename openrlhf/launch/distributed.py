"""Several processes: who needs DeepSpeed, how a process joins, how a model loads in shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from openrlhf.config.checks.extras import require
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import TrainingConfig
from openrlhf.launch.device import choose_device
from openrlhf.models.load import choose_dtype


def uses_deepspeed(config: TrainingConfig) -> bool:
    """One process trains by itself, unless it reads a checkpoint that only DeepSpeed can."""
    return world_size() > 1 or config.checkpoints.use_ds_universal_ckpt


def join(config: TrainingConfig) -> torch.device:
    """This process's device, after it has met the others."""
    device = choose_device(config.model.device, config.sharding.local_rank)
    if not uses_deepspeed(config):
        return device
    require("deepspeed", f"training with {world_size()} processes")
    from openrlhf.training.deepspeed_start import start_distributed

    return start_distributed(device)


def loading(config: TrainingConfig, device: torch.device) -> AbstractContextManager[None]:
    """Within it a language model comes in shards where ZeRO-3 will train it."""
    if not uses_deepspeed(config) or config.sharding.zero_stage != 3 or config.model.load_in_4bit:
        return nullcontext()
    from openrlhf.training.deepspeed_start import sharded_loading

    return sharded_loading(config.sharding, choose_dtype(config.model.param_dtype, device))
