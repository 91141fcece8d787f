"""One of two processes of a group, for test_peers.py: report where it listens, and meet a peer that sends a pickle."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import distributed as dist

from openrlhf.training.deepspeed import DeepSpeedBackend
from openrlhf.training.processes import start_distributed


class Attack:
    """An object that creates a file, named after the process, when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return attack, (self.folder,)


def attack(folder: Path) -> None:
    (folder / f"attacked-{dist.get_rank()}").touch()


def listening() -> list[str]:
    """Return the addresses on which this process accepts connections."""
    found = psutil.Process().net_connections("tcp")
    return sorted({one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN})


def main(folder: Path) -> None:
    start_distributed(torch.device("cpu"))
    rank = dist.get_rank()
    dist.barrier()  # now all connections are open
    report: dict[str, Any] = {"listening": listening()}
    if rank == 0:
        backend: Any = SimpleNamespace(device=torch.device("cpu"), group=dist.group.WORLD, data_parallel_size=2)
        try:
            DeepSpeedBackend.sum_metrics(backend, {})
        except (ValueError, AttributeError) as error:  # the old code failed only after it had run the peer's code
            report["error"] = type(error).__name__
    else:
        with suppress(pickle.UnpicklingError):  # the answer of the first process is not a pickle
            dist.all_gather_object([None, None], Attack(folder))
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
