"""Files on disks that may be full, forbidden or lose power.

Recognise the errors of such disks, ask for room before something large is written, and replace files as a whole.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.errors import DiskError
from openrlhf.monitor import say

GIB = 1024**3
# Errors that are the disk's and not the program's: another place, or the same one later, may work.
ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
MARGIN = 1.05  # of an estimated size


def disk_failure(error: BaseException) -> str | None:
    """Return why the disk did not accept a file, or None if the error is about something else.

    Only Python's own functions raise OSError. safetensors puts the operating system's message into its own error, also
    across Ray, and PyTorch reports no reason at all.
    """
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}" if error.errno in ERRNOS else None
    text = str(error)
    if isinstance(error, DiskError):
        return text
    for number in ERRNOS:
        if f"(os error {number})" in text or os.strerror(number) in text:
            return os.strerror(number)
    from_torch = "PytorchStreamWriter failed" in text or "inline_container.cc" in text
    return "a file could not be written" if from_torch else None


def bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(file.stat().st_size for file in files)


def bytes_free(folder: Path) -> int:
    """Return the free space of the disk that holds the folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def has_room(folder: Path, needed: int, what: str) -> bool:
    """Return whether `needed` bytes fit on the folder's disk; otherwise say that `what` is not written."""
    free = bytes_free(folder)
    if needed * MARGIN <= free:
        return True
    say(f"{what} is not written: it needs {show(needed)}, and {folder} has {show(free)} free. Training continues")
    return False


@contextmanager
def skip_if_disk_fails(what: str) -> Iterator[None]:
    """Report a DiskError in one line and go on."""
    try:
        yield
    except DiskError as error:
        say(f"{what} was not written: {error}. Training continues")


def show(size: float) -> str:
    """Return a size for messages."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def replace_file(path: Path, text: str) -> None:
    """Write a file so that after a crash either the old or the new content is there, complete."""
    aside = path.with_name(f".{path.name}.writing-{secrets.token_hex(6)}")
    try:
        aside.write_text(text, encoding="utf-8", errors="surrogateescape")
        flush(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
