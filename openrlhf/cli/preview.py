"""Show the data of a command as its model would see it: `openrlhf preview COMMAND [the command's flags]`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.entry import command
from openrlhf.cli.wrapped import wrapped_command
from openrlhf.config.preview import PREVIEWED, parse_preview
from openrlhf.monitor import is_main_process
from openrlhf.signals import interrupt_on_signals

USAGE = f"""openrlhf preview COMMAND [the command's flags] [--rows N]

Put `preview` in front of a command line to see its data before you train: rendered rows with the learned text marked,
lengths, totals and warnings. It loads the tokenizer and the data, but no model.

Commands: {", ".join(PREVIEWED)}
"""


@command
def main(argv: Sequence[str]) -> None:
    """Preview the data of the command that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    name = wrapped_command("preview", argv, PREVIEWED, "a command that reads data")
    config, flags = parse_preview(name, argv[1:])
    if is_main_process():  # a launcher's other processes would print the same
        with interrupt_on_signals():
            import_module("openrlhf.inference.preview").run(config, flags)


if __name__ == "__main__":
    main()
