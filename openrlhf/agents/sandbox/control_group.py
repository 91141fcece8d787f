"""Control groups: limits on memory and process count, shared by all processes of a run.

Versions 1 and 2 are supported if this process may create groups: version 1 below its own groups, version 2 next to its
own group or below it. Without groups, limits per process and per user apply instead.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

NAME = "openrlhf-program"
REMOVE_SECONDS = 5.0  # time for killed processes to leave a group, and for the kernel to free their memory
_numbers = itertools.count()


def own_groups(proc: Path = Path("/proc/self")) -> Iterator[tuple[set[str], Path]]:
    """Yield the controllers and the folder of each group of this process; in version 2 the controllers are {""}."""
    mounts: dict[frozenset[str], tuple[str, Path]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = (*right.split(), "", "")[:3]
        _, _, _, root, point = left.split()[:5]
        if kind == "cgroup2":
            mounts[frozenset({""})] = root, Path(point)
        elif kind == "cgroup":
            mounts[frozenset(options.split(","))] = root, Path(point)
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        controllers = set(names.split(","))
        for mounted, (root, point) in mounts.items():
            if controllers <= mounted and (path + "/").startswith(root.rstrip("/") + "/"):
                yield controllers, point / path.removeprefix(root).lstrip("/")


@dataclass
class ControlGroup:
    """New groups for the processes of one fork server."""

    memory: Path
    pids: Path  # in version 2 the same folder as `memory`
    written: dict[Path, int] = field(default_factory=dict)  # limits currently set

    @classmethod
    def create(cls, proc: Path = Path("/proc/self")) -> ControlGroup | None:
        """Create groups with the controllers for memory and processes; return None if that is not possible."""
        name = f"{NAME}-{os.getpid()}-{next(_numbers)}"
        found: dict[str, Path] = {}
        try:
            groups = list(own_groups(proc))
        except (OSError, ValueError):
            return None
        for controllers, folder in groups:
            parents = [folder.parent, folder] if controllers == {""} else [folder]
            for controller, wanted in (("memory", "memory."), ("pids", "pids.max")):
                if controllers != {""} and controller not in controllers:
                    continue
                for parent in parents:
                    if controller not in found and (made := make_group(parent, name, wanted)):
                        found[controller] = made
        if len(found) == 2:
            return cls(found["memory"], found["pids"])
        for folder in found.values():
            with suppress(OSError):
                folder.rmdir()
        return None

    @property
    def members(self) -> list[str]:
        """Files to which a process id is written to move the process into the groups."""
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys((self.memory, self.pids))]

    def limit(self, memory: int, processes: int) -> None:
        """Set the limits unless they are already set; raise OSError if the group uses more than they allow."""
        version_1 = (self.memory / "memory.limit_in_bytes").exists()
        files = {self.pids / "pids.max": processes}
        if version_1:
            files[self.memory / "memory.limit_in_bytes"] = memory
        else:
            files |= {self.memory / "memory.max": memory, self.memory / "memory.swap.max": 0}
        for file, value in files.items():
            if self.written.get(file) != value and file.exists():
                write_limit(file, value)
                self.written[file] = value

    def count_kills(self) -> int:
        """Return how many processes of this group the kernel's out-of-memory killer has ended."""
        for file in (self.memory / "memory.oom_control", self.memory / "memory.events"):
            with suppress(OSError):
                for line in file.read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0

    def remove(self) -> None:
        """Remove the groups, whose processes must have ended or be about to end."""
        deadline = time.monotonic() + REMOVE_SECONDS
        for folder in dict.fromkeys((self.memory, self.pids)):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.01)


def write_limit(file: Path, value: int) -> None:
    """Write a limit; in version 1 this fails with EBUSY as long as the group uses more memory than that."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            file.write_text(str(value))
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def make_group(parent: Path, name: str, file: str) -> Path | None:
    """Create a group; return None if this fails, or if no file has this prefix because the controller is missing."""
    remove_abandoned(parent)
    folder = parent / name
    try:
        folder.mkdir(exist_ok=True)
        if os.access(folder / "cgroup.procs", os.W_OK) and any(path.name.startswith(file) for path in folder.iterdir()):
            return folder
        folder.rmdir()
    except OSError:
        pass
    return None


def remove_abandoned(parent: Path) -> None:
    """Remove empty groups that a killed process left behind."""
    for folder in parent.glob(f"{NAME}-*-*"):
        owner = folder.name.removeprefix(f"{NAME}-").partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            with suppress(OSError):  # still in use
                folder.rmdir()
