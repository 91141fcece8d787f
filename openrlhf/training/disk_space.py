"""Writing to disks that may be full, read-only or lose power.

The functions recognise disk errors, check for free space before large writes, and replace files atomically.
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
# Errors of the disk, not of the program: another folder may work, or the same one later.
ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
MARGIN = 1.05  # factor on estimated sizes


def disk_failure(error: BaseException) -> str | None:
    """Return why a file could not be written, or None if the error has another cause.

    Only Python's own functions raise OSError. The errors of safetensors and Ray contain the operating system's message
    in their text, and PyTorch reports no reason at all.
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
    """Return whether `needed` bytes fit on the folder's disk; if not, print that `what` is not written."""
    free = bytes_free(folder)
    if needed * MARGIN <= free:
        return True
    say(f"{what} is not written: it needs {show(needed)}, but {folder} has {show(free)} free. Training continues")
    return False


@contextmanager
def skip_if_disk_fails(what: str) -> Iterator[None]:
    """Report a DiskError in one line and continue."""
    try:
        yield
    except DiskError as error:
        say(f"{what} was not written: {error}. Training continues")


def show(size: float) -> str:
    """Format a size in bytes for messages."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it has either all of its old content or all of the new."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="surrogateescape")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, and rename it to `path` once it is complete and on the disk."""
    aside = path.with_name(f".{path.name}.writing-{secrets.token_hex(6)}")
    try:
        yield aside
        flush(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
