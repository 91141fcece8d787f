"""Multi-process training: decide whether DeepSpeed is needed, join the other processes, load models in shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from openrlhf.config.checks.extras import require
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import TrainingConfig
from openrlhf.models.load import choose_dtype
from openrlhf.training.device import choose_device


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
    from openrlhf.training.deepspeed_start import start_distributed

    return start_distributed(device)


def loading(config: TrainingConfig, device: torch.device) -> AbstractContextManager[None]:
    """Return a context for loading language models: sharded if ZeRO-3 is used, plain otherwise.

    4-bit models always load plainly.
    """
    if not uses_deepspeed(config) or config.sharding.zero_stage != 3 or config.model.load_in_4bit:
        return nullcontext()
    from openrlhf.training.deepspeed_start import sharded_loading

    return sharded_loading(config.sharding, choose_dtype(config.model.param_dtype, device))
