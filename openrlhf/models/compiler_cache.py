"""The folder of code that PyTorch has compiled, whose content PyTorch unpickles and executes.

By default it is `torchinductor_USER` in the temporary folder, which another user of the machine can create first and
fill. `keep_compiled_code_private` is called before anything is compiled.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch also sets it
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep_compiled_code_private() -> None:
    """Choose the folder for this process and those that it starts, unless the user has named one."""
    os.environ[VARIABLE] = compiler_cache()


def compiler_cache() -> str:
    """Return the folder that the user has named, else PyTorch's default unless others can write to it, else our own."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    named = os.environ.get(VARIABLE, str(default))
    if named != str(default) or is_ours_alone(default):
        return named
    return str(Path.home() / ".cache" / "openrlhf" / "torchinductor")


def is_ours_alone(folder: Path) -> bool:
    """Create a folder if it does not exist; return whether it belongs to this user and no one else can write to it."""
    with suppress(OSError):  # it exists, or its parent cannot be written
        folder.mkdir(mode=0o700)
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
