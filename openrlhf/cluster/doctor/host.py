"""The host: processors, memory, shared memory, disks, ports and limits."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from openrlhf.cluster.doctor.findings import Diagnosis, size

AREA = "Host"
GIB = 2**30
LITTLE_MEMORY, LITTLE_SHARED, LITTLE_DISK = 4 * GIB, 1 * GIB, 10 * GIB
FEW_FILES = 4096
RAY_PORT = 6379
SHARED = Path("/dev/shm")
GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_findings() -> Iterator[Diagnosis]:
    """Yield the findings about this machine, apart from its GPUs."""
    yield from memory_findings()
    yield from disk_findings()
    yield from port_findings()
    yield from limit_findings()


def memory_findings() -> Iterator[Diagnosis]:
    """Yield the number of cores, and the sizes of memory and shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Diagnosis(AREA, "cores", str(cores))
    memory = usable_memory()
    fix = "a machine or container with more memory: models are loaded in host memory first"
    yield judged("memory", size(memory), fix, enough=memory >= LITTLE_MEMORY)
    if SHARED.is_dir():
        usage = shutil.disk_usage(SHARED)
        fix = "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm (Ray and NCCL use it)"
        value = f"{size(usage.free)} of {size(usage.total)} free"
        yield judged(str(SHARED), value, fix, enough=usage.total >= LITTLE_SHARED)


def judged(subject: str, value: str, fix: str, *, enough: bool) -> Diagnosis:
    """Return a finding that is fine if there is enough, and otherwise a warning with a fix."""
    return Diagnosis(AREA, subject, value) if enough else Diagnosis(AREA, subject, value, "warning", fix)


def usable_memory() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in GROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            memory = min(memory, int(Path(path).read_text(encoding="ascii")))
    return memory


def disk_findings() -> Iterator[Diagnosis]:
    """Yield the free space of the folders that a run writes to."""
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    for name, folder, move in (
        ("current folder", Path.cwd(), "--save_path on another disk"),
        ("hub cache", Path(cache).expanduser(), "HF_HOME=/path/on/another/disk in the environment"),
        ("temporary folder", Path(tempfile.gettempdir()), "TMPDIR=/path/on/another/disk in the environment"),
    ):
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            status = "broken" if name == "temporary folder" else "warning"
            yield Diagnosis(AREA, name, f"{folder} cannot be written to", status, move)
        else:
            yield judged(name, f"{folder}, {size(free)} free", move, enough=free >= LITTLE_DISK)


def port_findings() -> Iterator[Diagnosis]:
    """Check that this process may listen on a port, and that Ray's port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Diagnosis(AREA, "loopback", "can listen on 127.0.0.1")
    except OSError as error:
        fix = "allow 127.0.0.1: ip link set lo up (Ray, vLLM and several processes need it)"
        yield Diagnosis(AREA, "loopback", f"cannot listen on 127.0.0.1: {error.strerror}", "warning", fix)
        return
    with socket.socket() as probe:
        probe.settimeout(1)
        taken = probe.connect_ex(("127.0.0.1", RAY_PORT)) == 0
    if taken:
        value = f"{RAY_PORT} is in use; if that is your Ray, runs join it"
        yield Diagnosis(AREA, "Ray's port", value, "note")
    else:
        yield Diagnosis(AREA, "Ray's port", f"{RAY_PORT} is free")


def limit_findings() -> Iterator[Diagnosis]:
    """Yield the limits on open files and locked memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = "ulimit -n 65536 (Ray and vLLM open many files)"
    yield judged("open files", shown_limit(files), fix, enough=files == resource.RLIM_INFINITY or files >= FEW_FILES)
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limited = locked != resource.RLIM_INFINITY
        value = f"{shown_limit(locked)} bytes; InfiniBand needs ulimit -l unlimited" if limited else shown_limit(locked)
        yield Diagnosis(AREA, "locked memory", value, "note" if limited else "ok")


def shown_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
