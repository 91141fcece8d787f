"""Commands in front of another command line: `openrlhf preview COMMAND ...`, `openrlhf plan COMMAND ...`."""

import sys
from collections.abc import Callable, Collection, Sequence

from openrlhf.config.suggestions import suggest_commands
from openrlhf.errors import ConfigError
from openrlhf.monitor import is_main_process
from openrlhf.signals import interrupt_on_signals


def wrapped_command(
    wrapper: str, argv: Sequence[str], usage: str, accepted: Collection[str], expected: str
) -> str | None:
    """Return the command that the first argument names, or print the usage and return None.

    If the command is not accepted, the error suggests similar names.
    """
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return None
    name = argv[0].replace("-", "_")
    if name not in accepted:
        near = [line for line in suggest_commands(argv, accepted) if line.split()[0] in accepted]
        fix = " or ".join(f"openrlhf {wrapper} {line}" for line in near) or " or ".join(accepted)
        raise ConfigError(f"{wrapper}: expected {expected}, got {argv[0]}", try_this=fix)
    return name


def run_in_main_process(work: Callable[[], object]) -> None:
    """Run in the main process only; the other processes of a launcher would print the same."""
    if is_main_process():
        with interrupt_on_signals():
            work()
