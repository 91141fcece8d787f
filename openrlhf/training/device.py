"""Device selection and random seeds of a process, with notices about flags that have no effect on a CPU."""

import os
import random

import numpy as np
import torch

from openrlhf.config.commands import TrainingConfig
from openrlhf.errors import ConfigError
from openrlhf.monitor import say


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


def explain_precision(asked: str, device: torch.device) -> None:
    """Say that a CPU run computes in fp32 whatever precision was requested."""
    if device.type == "cpu" and asked != "fp32":
        say(f"no GPU: everything computes in fp32, since {asked} is many times slower on a CPU")


def explain_offloading(config: TrainingConfig, device: torch.device) -> None:
    """Say that --adam_offload has no effect on a CPU."""
    if device.type == "cpu" and config.sharding.adam_offload:
        say("--adam_offload has no effect: the optimizer of a CPU run is in host memory already")


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed Python, NumPy and PyTorch; with `deterministic`, also require deterministic PyTorch algorithms."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_dropout(seed: int, rank: int) -> None:
    """Give processes with different tokens different dropout masks; `rank` is equal for tensor-parallel peers.

    Call it after the models are built: until then all processes use the same seed, so that newly initialised weights
    agree.
    """
    torch.manual_seed(int(np.random.default_rng((seed, rank)).integers(2**63)))
