"""Random numbers: seeds at the start of a run, and random states in its checkpoints.

All processes start from the same seed, so newly initialised weights agree; after the models are built, each process
gets a different seed for dropout. A checkpoint contains one file of random states per rank, so that a resumed run uses
the same random numbers as an uninterrupted one.
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
    """Give processes with different tokens different seeds for dropout; tensor-parallel peers pass the same `rank`.

    Call this after the models are built, because newly initialised weights must agree in all processes.
    """
    torch.manual_seed(int(np.random.default_rng((seed, rank)).integers(2**63)))


def save_rng(folder: Path, rank: int) -> None:
    """Write the random states of PyTorch in this process to a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"rng_rank{rank}.safetensors")


def load_rng(folder: Path, rank: int) -> None:
    """Restore the random states of a checkpoint, unless it was saved on fewer ranks."""
    path = folder / f"rng_rank{rank}.safetensors"
    if not path.exists():
        return
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
