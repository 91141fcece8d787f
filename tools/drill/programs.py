"""Start the commands of a drill, kill them, and look for what they leave behind.

Each program has its own folder, which is its working directory; its temporary files go to `tmp` in there. Programs
start warm (tests.warm), so a run takes a few seconds. The processes of a run are those that carry its folder in their
environment or work in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.commands import as_argv, command_environ
from tests.warm import warm_python
from tools.drill.outcome import Lost

WATCHDOG = 600  # seconds; only a hanging run takes this long
GRACE = 30.0  # seconds after a kill within which the run and all its processes must end
MARK = "DRILL_FOLDER"
SHARED_MEMORY = Path("/dev/shm")
OUTPUT = "output.txt"
KEPT = (".about.json",)  # hidden files that belong to a run; the others are temporary


def start(folder: Path, words: Sequence[str], **environ: str) -> subprocess.Popen[bytes]:
    """Start a program in its folder; its output goes to output.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    own = {MARK: str(folder), "TMPDIR": str(folder / "tmp")}
    with (folder / OUTPUT).open("w", encoding="utf-8") as output:
        return subprocess.Popen(
            words,
            cwd=folder,
            stdout=output,
            stderr=output,
            env=command_environ(**own | environ),
            start_new_session=True,
        )


def command_words(command: str, flags: dict[str, object]) -> list[str]:
    """Return the words that run one of our commands in a warm process."""
    return [*warm_python(), "-m", f"openrlhf.cli.{command}", *as_argv(flags)]


def finish(process: subprocess.Popen[bytes], folder: Path, code: int = 0) -> float:
    """Wait for a program to end with this exit code; return the seconds it took from now on."""
    begun = time.monotonic()
    try:
        process.wait(WATCHDOG)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Lost(f"the run hangs: {last_line(folder)}") from None
    if process.returncode != code:
        raise Lost(f"exit code {process.returncode} instead of {code}: {last_line(folder)}")
    return time.monotonic() - begun


def wait_seconds(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for some seconds; return whether the program is still running."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def read_output(folder: Path) -> str:
    return (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")


def last_line(folder: Path) -> str:
    """Return the last line that a program printed, for the reason of a loss."""
    lines = [line for line in read_output(folder).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def processes_of(folder: Path) -> list[psutil.Process]:
    """List the processes that belong to the run in this folder, or to any run below it."""
    mark = re.compile(re.escape(f"{MARK}={folder}".encode()) + b"[/\0]")
    found = []
    for process in psutil.process_iter():
        here = Path("/proc") / str(process.pid)
        with suppress(OSError, psutil.Error):  # it has ended, or belongs to another user
            in_folder = Path(os.readlink(here / "cwd")).is_relative_to(folder)
            if (in_folder or mark.search((here / "environ").read_bytes())) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(folder: Path) -> list[psutil.Process]:
    """Kill every process of the runs in this folder; return them."""
    left = processes_of(folder)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return left


def must_end(folder: Path, seconds: float = GRACE) -> None:
    """Wait until no process of the run is left; if that takes too long, end them and count the case as lost."""
    deadline = time.monotonic() + seconds
    while left := processes_of(folder):
        if time.monotonic() > deadline:
            names = sorted({describe(process) for process in left})
            end_all(folder)
            raise Lost(f"{len(left)} processes are left {seconds:g} s after the kill: {', '.join(names)}")
        time.sleep(0.05)


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:60] or process.name()
    return "ended"


def shared_files() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def must_leave_no_files(folder: Path, before: set[str] | None, expected: tuple[str, ...] = ()) -> None:
    """Check temporary files, hidden folders and shared memory after a run has ended by itself.

    Names that begin with `expected` belong to other programs. So does a shared file that a live process maps, since
    this run has no processes left. Shared memory is checked only if `before` is given: the names that existed before
    the run.
    """
    hidden = [path for path in folder.rglob(".*") if path.name not in KEPT and "cache" not in path.parts]
    temporary = [path for path in (folder / "tmp").iterdir() if not path.name.startswith(expected)]
    new = set() if before is None else shared_files() - before
    shared = [SHARED_MEMORY / name for name in new - _mapped(new)] if new else []
    if left := [*hidden, *temporary, *shared]:
        raise Lost(f"left behind: {', '.join(str(path) for path in sorted(left)[:5])}")


def _mapped(names: set[str]) -> set[str]:
    """Return which of these files of shared memory some process maps or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (process / "maps").read_text()
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
            found |= {
                name for name in names if f"{SHARED_MEMORY}/{name}" in maps or f"{SHARED_MEMORY}/{name}" in opened
            }
    return found
