"""Small functions that Ray runs on a node to inspect it. They import nothing heavy."""

import socket
from pathlib import Path


def own_device() -> str:
    """Return the GPU that Ray assigned to this process, by its name in CUDA_VISIBLE_DEVICES.

    The variable itself is not reliable: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES leaves it unset or inherited.
    """
    import ray

    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(assigned)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def unseen(files: list[Path]) -> list[Path]:
    """Return the files that this node does not see."""
    return [file for file in files if not file.exists()]
