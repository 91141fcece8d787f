"""Flags of the run viewer, `openrlhf view`."""

from dataclasses import dataclass

from openrlhf.config.flags import flag
from openrlhf.config.sections.inference import PORT


@dataclass(frozen=True, kw_only=True)
class RunFolderFlags:
    """Runs"""

    run_dirs: tuple[str, ...] = flag(
        (),
        "Folders of runs: a --run_dir, a --save_path, or a folder that contains several of them.",
        positional="RUN_DIR",
        required="openrlhf view ./ckpt",
    )


@dataclass(frozen=True, kw_only=True)
class PageFlags:
    """Page"""

    port: int | None = flag(
        None, "Port to serve the page on, at 127.0.0.1 (default: a free port).", PORT, essential=True
    )
    open: bool = flag(False, "Open the page in the default browser.", essential=True)
    export: str | None = flag(
        None, "Write the page to this HTML file, which needs no server and no network, and exit.", essential=True
    )
