"""Limits for a program that a model wrote, and the result of running it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from openrlhf.agents.sandbox.program_frames import ServerLimits

Limit: TypeAlias = Literal["seconds", "cpu_seconds", "memory", "output"]


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program. Sizes are in bytes."""

    seconds: float = 5.0
    """Wall-clock time."""
    cpu_seconds: int | None = None
    """Processor time of each process; default: one second more than `seconds`."""
    memory: int = 1 << 30
    """Memory of all processes together if control groups are available, else of each process."""
    processes: int = 32
    """Number of concurrent processes and threads."""
    output: int = 1 << 16
    """Size of standard output and of standard error, each; a program that writes more is killed."""
    file_size: int = 1 << 24
    """Size of each file."""
    disk: int = 1 << 26
    """Size of all files together, which are kept in memory. Not enforced without isolation."""

    def for_server(self, processes: int) -> ServerLimits:
        """Return the limits in the form that the fork server expects; `processes` is the value of RLIMIT_NPROC."""
        cpu = math.ceil(self.seconds) + 1 if self.cpu_seconds is None else self.cpu_seconds
        resources = {
            "RLIMIT_CPU": (cpu, cpu + 1),  # SIGXCPU, then SIGKILL
            "RLIMIT_AS": (self.memory, self.memory),
            "RLIMIT_NPROC": (processes, processes),
            "RLIMIT_FSIZE": (self.file_size, self.file_size),
            "RLIMIT_NOFILE": (256, 256),
            "RLIMIT_CORE": (1, 1),  # unlike 0, it also keeps the kernel from starting a crash handler
        }
        return {"seconds": self.seconds, "output": self.output, "disk": self.disk, "resources": resources}


DEFAULT_LIMITS = ProgramLimits()


@dataclass(frozen=True)
class ProgramResult:
    """Exit code, output and running time of a program."""

    exit_code: int
    """As in subprocess: negative if a signal ended the program."""
    stdout: str
    stderr: str
    limit: Limit | None
    """The limit that the program exceeded, if it was killed for that."""
    seconds: float
    """Wall-clock time of the run."""
