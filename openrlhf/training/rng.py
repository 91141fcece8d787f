"""Random numbers: seeds at the start of a run, and random states in its checkpoints.

All processes start from the same seed, so that newly initialised weights agree, and are given different ones for
dropout once the models are built. A checkpoint holds one safetensors file of states per rank, so that a resumed run
continues with the numbers that an uninterrupted one would have used.
"""

import os
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


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


def save_rng(folder: Path, rank: int) -> None:
    """Write PyTorch's random states of this process into a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"rng_rank{rank}.safetensors")


def load_rng(folder: Path, rank: int) -> None:
    """Restore what `save_rng` wrote; a rank that did not exist then keeps its own state."""
    path = folder / f"rng_rank{rank}.safetensors"
    if not path.exists():
        return  # the run was saved on fewer ranks
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
