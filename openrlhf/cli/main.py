"""The program `openrlhf <command>`, equivalent to `python -m openrlhf.cli.<command>`."""

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
    """List the commands, print the version, or pass the remaining arguments to a command."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = (f"  {name:<18}{(config.__doc__ or '').strip()}\n" for name, config in COMMANDS.items())
        sys.stdout.write("openrlhf <command> [--flag value ...]\n\n" + "".join(lines))
        sys.stdout.write("\nopenrlhf <command> --help lists its flags.\n")
    elif argv[0] == "--version":
        sys.stdout.write(f"openrlhf {version('openrlhf')}\n")
    elif (name := argv[0].replace("-", "_")) in COMMANDS:
        import_module(f"openrlhf.cli.{name}").main(argv[1:])
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=3) or ["openrlhf --help"]
        raise ConfigError(f"unknown command {argv[0]}", try_this=" or ".join(near))


if __name__ == "__main__":
    main()
