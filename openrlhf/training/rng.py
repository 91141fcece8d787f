"""Random-number states in a checkpoint, one safetensors file per rank."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_rng(folder: Path, rank: int) -> None:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"rng_rank{rank}.safetensors")


def load_rng(folder: Path, rank: int) -> None:
    path = folder / f"rng_rank{rank}.safetensors"
    if not path.exists():
        return  # the run was saved on fewer ranks
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
