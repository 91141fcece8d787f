"""What is asked of a node from within: small functions that Ray runs there. They import nothing heavy."""

import socket
from pathlib import Path


def own_device() -> str:
    """The GPU that Ray assigned to this process, as CUDA_VISIBLE_DEVICES names it.

    Ray is asked and not the variable: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES leaves it unset or as inherited.
    """
    import ray

    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(assigned)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def unseen(files: list[Path]) -> list[Path]:
    """Those of the files that this node does not see."""
    return [file for file in files if not file.exists()]
