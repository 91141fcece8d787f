"""Run a command while one of its folders is on a disk that is too small, or read-only.

    python -m tools.drill.small_disk KIND FOLDER COMMAND [FLAGS...]

KIND is a number of KiB, or `read_only`. The disk is a mount that only this process and its children see; its contents
are copied to FOLDER.seen at the end. Without the right to mount, the size of files is limited instead (RLIMIT_FSIZE),
and a read-only folder just lacks write permission, which does not stop root.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

from openrlhf.agents.sandbox import linux

READ_ONLY = "read_only"


def main() -> None:
    kind, folder, command, *argv = sys.argv[1:]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        mount_disk(path, kind)
    except OSError:
        limit_without_mount(path, kind)
    try:
        import_module(f"openrlhf.cli.{command}").main(argv)
    finally:
        shutil.copytree(path, f"{folder}.seen", dirs_exist_ok=True)


def mount_disk(folder: Path, kind: str) -> None:
    """Mount a small or read-only disk over the folder, in a mount namespace of this process."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        linux.unshare(linux.NEW_MOUNTS)
    else:
        linux.unshare(linux.NEW_MOUNTS | linux.NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    linux.mount("none", "/", flags=linux.RECURSIVE | linux.SLAVE)  # none of this is visible outside
    if kind == READ_ONLY:
        linux.bind(str(folder), str(folder))
    else:
        linux.mount("drill", str(folder), "tmpfs", options=f"size={kind}k")


def limit_without_mount(folder: Path, kind: str) -> None:
    """Limit file sizes or permissions instead, without the right to mount."""
    if kind == READ_ONLY:
        if os.getuid() == 0:
            sys.exit("openrlhf: error: root needs the right to mount for a read-only folder")
        folder.chmod(0o500)
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write fails with EFBIG instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(kind) * 1024, int(kind) * 1024))


if __name__ == "__main__":
    main()
