"""Small functions that Ray runs on a node to inspect it. They import no heavy modules."""

import socket
from pathlib import Path


def own_device() -> str:
    """Return the GPU that Ray assigned to this process, by its name in CUDA_VISIBLE_DEVICES.

    The variable itself is not reliable: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES leaves it unset or inherited.
    """
    import ray

    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(assigned)


def find_free_port(address: str) -> int:
    """Return a port that is free on this address of the node."""
    family, *_, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(found)
        return probe.getsockname()[1]


def unseen(files: list[Path]) -> list[Path]:
    """Return the files that do not exist on this node."""
    return [file for file in files if not file.exists()]
