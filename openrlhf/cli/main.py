"""The `openrlhf <command>` program, equivalent to `python -m openrlhf.cli.<command>`."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from openrlhf.cli.entry import command
from openrlhf.config.commands import COMMANDS
from openrlhf.errors import ConfigError


@command
def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return
    if argv[0] == "--version":
        sys.stdout.write(f"openrlhf {version('openrlhf')}\n")
        return
    name, rest = argv[0].replace("-", "_"), argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=3) or ["openrlhf --help"]
        raise ConfigError(f"there is no command {argv[0]}", try_this=" or ".join(near))
    import_module(f"openrlhf.cli.{name}").main(rest)


def overview() -> str:
    lines = [f"  {name:<18}{(config.__doc__ or '').strip()}" for name, config in COMMANDS.items()]
    return "\n".join(
        ["openrlhf <command> [--flag value ...]", "", *lines, "", "openrlhf <command> --help lists its flags.", ""]
    )


if __name__ == "__main__":
    main()
