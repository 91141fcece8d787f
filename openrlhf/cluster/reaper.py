"""Remove everything that a private Ray leaves behind, however its run ends.

`private_folder` makes the folder of a private Ray and starts this file as a small process, the reaper. When the driver
is done or dies, the reaper kills the remaining processes of the private Ray (`belongs_to`) and removes the folder.
Without it, Ray's agents would wait for a lost head for a minute, and the folder would stay. If the reaper itself was
killed, the next run that starts a private Ray cleans up (`remove_leftovers`).

This file also runs as a script, so it does not import the package.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import psutil

MARK = "OPENRLHF_PRIVATE_RAY"  # environment variable of Ray's processes: the folder of their private Ray
PREFIX = "openrlhf-ray-"
ALIVE = "alive"  # file that the driver keeps locked while it runs
KEPT = "kept"  # file that marks a folder whose logs are kept
KEPT_SECONDS = 7 * 24 * 3600.0  # age at which kept logs and folders of unknown state are removed
CHECK_EVERY = 0.5  # seconds
SECONDS_TO_REAP = 30.0
SCAN_EVERY = 0.1  # seconds
QUIET_SCANS = 3  # consecutive scans without a match; one may miss a process whose exec has emptied its environment


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for a private Ray; at the end, kill its processes and remove it, unless it has a file KEPT."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with hold(folder):
        reaper = subprocess.Popen(
            [sys.executable, "-I", __file__, str(folder), str(os.getpid())],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C or a signal to the driver's group does not end it
        )
        try:
            yield folder
        finally:
            reaper.communicate(b"end")  # closing the pipe is not enough: a forked child may hold it open


def hold(folder: Path) -> BinaryIO:
    """Lock the folder's file ALIVE while the returned file is open; it gets the name ALIVE only once it is locked."""
    file = (folder / f"{ALIVE}.new").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / f"{ALIVE}.new").rename(folder / ALIVE)
    return file


def remove_leftovers(parent: Path) -> list[Path]:
    """Clean up after killed runs of this user, and remove logs older than KEPT_SECONDS; return the removed folders."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another run may remove it at the same time
            status = folder.lstat()
            if status.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink() and is_left(folder):
                reap(folder, os.getpid())
                removed.append(folder)
    return removed


def is_left(folder: Path) -> bool:
    """Return whether the folder can be deleted: no run uses it, and logs kept after an error have expired."""
    old = time.time() - folder.lstat().st_mtime > KEPT_SECONDS
    if not (folder / ALIVE).exists():  # just made, or made by an older version
        return old
    with (folder / ALIVE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return old or not (folder / KEPT).exists()


def reap(folder: Path, driver: int) -> None:
    """Kill the processes of the folder's Ray, but not the driver, and remove the folder unless its logs are kept."""
    import psutil

    deadline = time.monotonic() + SECONDS_TO_REAP
    quiet = 0  # scans in a row without a process of this Ray
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        quiet += 1
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                if belongs_to(process, folder, driver):
                    process.kill()
                    quiet = 0
        time.sleep(SCAN_EVERY)
    if not (folder / KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)


def belongs_to(process: psutil.Process, folder: Path, driver: int) -> bool:
    """Return whether a process belongs to the folder's Ray: it inherited MARK or writes to a file in the folder.

    MARK alone is not enough: Ray's agents overwrite part of their environment with a title for `ps`.
    """
    if process.pid == driver or process.uids().real != os.getuid():
        return False
    if process.environ().get(MARK) == str(folder):
        return True
    if process.ppid() == driver:  # a fork of the driver has the driver's own log open
        return False
    # Only Linux reports how a file was opened; there, a process that only reads a log does not count.
    written = [file.path for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    return any(Path(path).is_relative_to(folder) for path in written)


def main() -> None:
    """Wait until the driver writes to the pipe or dies, even if its forked child holds the pipe open; then clean up."""
    folder, driver = Path(sys.argv[1]), int(sys.argv[2])  # not os.getppid(): the driver may be gone already
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == driver and not select.select([sys.stdin], [], [], CHECK_EVERY)[0]:
        pass
    reap(folder, driver)


if __name__ == "__main__":
    main()
