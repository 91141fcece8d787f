"""What is asked of a node from within: small functions that Ray runs there. They import nothing heavy."""

import os
import socket
from pathlib import Path


def own_device() -> str:
    """The GPU of this process, as CUDA_VISIBLE_DEVICES names it."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def unseen(files: list[Path]) -> list[Path]:
    """Those of the files that this node does not see."""
    return [file for file in files if not file.exists()]
