"""A lock on a folder, so that only one run writes to it.

The lock is an `flock` on a small file in the folder; the file names the holder for error messages. The kernel releases
the lock when the process ends for any reason, so the file of a killed run does not block the next one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from openrlhf.errors import ConfigError
from openrlhf.monitor import say

LOCK_FILE = ".openrlhf.lock"
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of file systems without locks

_held: set[int] = set()  # descriptors of the locks of this process


def _close_in_child() -> None:
    # A forked child inherits the descriptor, and would hold the lock even after its parent is killed.
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def hold_folder(folder: Path, flag: str, file: str = LOCK_FILE, *, instead: str = "") -> Iterator[None]:
    """Hold the lock of a folder, which is created if it does not exist.

    `flag` names the folder in messages; `instead` is a command line that avoids a conflict with another run.

    Raise ConfigError if another run holds the lock. On exit, the file is removed, and so are folders that were created
    for it and are still empty.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = _lock(folder / file)
    except BlockingIOError:
        raise ConfigError(
            f"{flag} {folder} is in use by another run{_holder(folder / file)}",
            try_this=f"{instead or f'another {flag}'}, or wait until that run ends",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder} cannot be written: {error.strerror or error}", try_this=f"another {flag}"
        ) from None
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked child, which has no lock to release
            with suppress(OSError):  # remove the file unless it was deleted or replaced during the run
                if os.path.samestat(os.fstat(descriptor), os.stat(folder / file)):
                    (folder / file).unlink()
            _held.discard(descriptor)
            os.close(descriptor)
            with suppress(OSError):  # not empty
                for path in missing:
                    path.rmdir()


@contextmanager
def hold_folders(folders: Mapping[str, Path], instead: Mapping[str, str] | None = None) -> Iterator[None]:
    """Hold the locks of several folders, keyed by flag; a folder that two flags name is locked once."""
    instead = instead or {}
    locked: set[Path] = set()
    with ExitStack() as stack:
        for flag, folder in folders.items():
            if folder.resolve() not in locked:
                stack.enter_context(hold_folder(folder, flag, instead=instead.get(flag, "")))
                locked.add(folder.resolve())
        yield


def _lock(path: Path) -> int:
    """Lock the file and describe this process in it; raise BlockingIOError if another process has the lock."""
    while True:
        # Do not follow a link: another user could have planted it, and the file that it names would be emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                say(f"{path.parent} does not support locks ({error.strerror}): make sure that no other run uses it")
                return descriptor
            # The previous holder may have removed the file after we opened it; our lock would then protect nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    _write_holder(descriptor)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    # Leave out flags, which may contain API keys.
    command = [Path(sys.argv[0]).stem, *(word for word in sys.argv[1:2] if not word.startswith("-"))]
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(command),
    }
    with suppress(OSError):  # the lock works even if the disk is full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    """Describe the process that holds the lock; empty if the file does not name it."""
    try:
        holder = json.loads(path.read_bytes())
        return f": process {holder['pid']} on host {holder['host']} ({holder['command']}, started {holder['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
