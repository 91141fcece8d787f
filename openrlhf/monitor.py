"""What a run says, and to whom."""

import os
import sys


def is_main_process() -> bool:
    """True in the one process that speaks: a launcher numbers the others with RANK."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """One line for the person at the console; on stderr, so that output can be piped."""
    if is_main_process():
        print(f"openrlhf: {line}", file=sys.stderr, flush=True)  # noqa: T201
