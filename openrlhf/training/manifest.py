"""Check that a checkpoint is intact and safe to unpickle.

`write_manifest` lists the size and checksum of each file of a finished checkpoint, and `find_damage` compares the files
with this list. A checksum is SHA-256 over the SHA-256 digests of the file's 16 MiB blocks, so that threads can share
the work on a single large file. DeepSpeed's shards are pickles, which can run code: `must_be_private` rejects them if
another user can write to their folder or replace it.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openrlhf.errors import BackendError

MANIFEST = "manifest.json"
BLOCK = 16 * 1024**2  # bytes
MOST_THREADS = 16
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def write_manifest(folder: Path) -> None:
    """List the files of a checkpoint; call it when all of them are complete."""
    files = (path for path in folder.rglob("*") if path.is_file())
    sums = checksums(folder, sorted(path.relative_to(folder).as_posix() for path in files))
    listed = {name: {"bytes": (folder / name).stat().st_size, "sha256": value} for name, value in sums.items()}
    (folder / MANIFEST).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """Return the first problem with the files that the manifest lists, or None; files added later are ignored."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected: dict[str, tuple[int, str]] = {
            name: (int(file["bytes"]), str(file["sha256"])) for name, file in listed.items()
        }
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, _) in expected.items():  # sizes first, because they are fast to check
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    try:
        sums = checksums(folder, list(expected))
    except OSError as error:
        return f"a file cannot be read: {error.strerror}: {error.filename}"
    damaged = [name for name, (_, value) in expected.items() if sums[name] != value]
    return f"{damaged[0]} does not match its checksum" if damaged else None


def checksums(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the checksum of each file, computed on several threads."""

    def digest(name: str, start: int) -> bytes:
        with (folder / name).open("rb", buffering=0) as file:
            file.seek(start)
            return hashlib.sha256(file.read(BLOCK)).digest()  # releases the GIL

    blocks = [(name, start) for name in names for start in range(0, max((folder / name).stat().st_size, 1), BLOCK)]
    sums = {name: hashlib.sha256() for name in names}
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for (name, _), found in zip(blocks, pool.map(digest, *zip(*blocks, strict=True)), strict=True):
            sums[name].update(found)
    return {name: value.hexdigest() for name, value in sums.items()}


def make_private(path: Path) -> None:
    """Remove other users' permission to write a file or folder, which a umask of 002 grants to the group."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS_WRITE:
        path.chmod(mode & ~OTHERS_WRITE)


def checkpoints_above(folder: Path) -> Path:
    """Return the --ckpt_path that contains `folder`, a checkpoint or a folder inside one."""
    inside = [path for path in (folder, *folder.parents) if path.name.startswith("global_step")]
    return (inside[-1] if inside else folder).parent


def must_be_private(root: Path, folder: Path) -> None:
    """Raise if another user can change or replace `folder`; `root` is the --ckpt_path that contains it."""
    above = [path for path in folder.parents if path.is_relative_to(root)]
    for path in (*above, folder, *folder.rglob("*")):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise BackendError(
                f"{path} belongs to user {status.st_uid}, and loading DeepSpeed's checkpoints can run code: expected a"
                f" file owned by user {os.geteuid()} or root",
                try_this=f"chown -R {os.geteuid()} {root}, if you trust its contents",
            )
        if status.st_mode & OTHERS_WRITE:
            raise BackendError(
                f"other users can write {path}, and loading DeepSpeed's checkpoints can run code: expected mode"
                f" {stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE:o}, got {stat.S_IMODE(status.st_mode):o}",
                try_this=f"chmod -R go-w {root}, if you trust its contents",
            )
    for path in dict.fromkeys((*root.absolute().parents, *root.resolve().parents)):  # `root` may be a link
        if can_be_replaced_in(path):
            raise BackendError(
                f"other users can write {path} and thus replace {root}, and loading DeepSpeed's checkpoints can run"
                " code: expected a folder that only its owner can write, or with a sticky bit",
                try_this=f"chmod go-w {path}, or chmod +t {path}",
            )


def can_be_replaced_in(folder: Path) -> bool:
    """Return whether users other than the owner can rename the entries of a folder, which a sticky bit prevents."""
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return False
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not is_private(status.st_gid)))


def is_private(group: int) -> bool:
    """Return whether only root or this user is in a group: systems with one group per user often use umask 002."""
    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:  # a user or group without a name, as in containers
        return group == 0
    return group == 0 or (found.gr_name == user and set(found.gr_mem) <= {user})
