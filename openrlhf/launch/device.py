"""Where a process computes, and what it owes to chance."""

import os
import random

import numpy as np
import torch

from openrlhf.config.commands import TrainingConfig
from openrlhf.errors import ConfigError
from openrlhf.monitor import say


def choose_device(asked: str, local_rank: int = -1) -> torch.device:
    """A launcher gives each process its GPU by LOCAL_RANK; alone it is the first one, or the CPU."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch sees no GPU here", try_this="--device cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where anything imports it, need not guess aloud
        return torch.device("cpu")
    number = local_rank if local_rank != -1 else int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def explain_precision(asked: str, device: torch.device) -> None:
    if device.type == "cpu" and asked != "fp32":
        say(f"no GPU: everything computes in fp32, since {asked} is many times slower on a CPU")


def explain_offloading(config: TrainingConfig, device: torch.device) -> None:
    if device.type == "cpu" and config.sharding.adam_offload:
        say("--adam_offload has no effect: the optimizer of a CPU run is in host memory already")


def seed_everything(seed: int, *, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_dropout(seed: int, rank: int) -> None:
    """Masks of their own for those with tokens of their own; until here all draw alike, so new weights are the same."""
    torch.manual_seed(int(np.random.default_rng((seed, rank)).integers(2**63)))
