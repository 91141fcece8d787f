"""Commands in front of another command line: `openrlhf preview COMMAND ...`, `openrlhf plan COMMAND ...`."""

import sys
from collections.abc import Callable, Collection, Sequence

from openrlhf.cli.entry import command
from openrlhf.config.suggestions import suggest_commands
from openrlhf.errors import ConfigError
from openrlhf.monitor import is_main_process
from openrlhf.signals import interrupt_on_signals


def make_wrapper(
    wrapper: str, usage: str, accepted: Collection[str], expected: str, run: Callable[[str, Sequence[str]], object]
) -> Callable[..., None]:
    """Build the entry point of a wrapper; `run` gets the name and the flags of the command that it accepts.

    If the command is not accepted, the error suggests similar names. Only the main process runs, because the other
    processes of a launcher would print the same.
    """

    @command
    def main(argv: Sequence[str]) -> None:
        if not argv or argv[0] in ("-h", "--help"):
            sys.stdout.write(f"{usage}\nCommands: {', '.join(accepted)}\n")
            return
        name = argv[0].replace("-", "_")
        if name not in accepted:
            near = [line for line in suggest_commands(argv, accepted) if line.split()[0] in accepted]
            fix = " or ".join(f"openrlhf {wrapper} {line}" for line in near) or " or ".join(accepted)
            raise ConfigError(f"{wrapper}: expected {expected}, got {argv[0]}", try_this=fix)
        if is_main_process():
            with interrupt_on_signals():
                run(name, argv[1:])

    return main
