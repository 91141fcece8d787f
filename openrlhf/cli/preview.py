"""Show the data of a command as its model would see it: `openrlhf preview COMMAND [the command's flags]`."""

from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.entry import command
from openrlhf.cli.wrapped import run_in_main_process, wrapped_command
from openrlhf.config.preview import PREVIEWED, parse_preview

USAGE = f"""openrlhf preview COMMAND [the command's flags] [--rows N]

Put `preview` in front of a command line to see its data before you train: rendered rows with the trained text marked,
lengths, totals and warnings. It loads the tokenizer and the data, but no model.

Commands: {", ".join(PREVIEWED)}
"""


@command
def main(argv: Sequence[str]) -> None:
    """Preview the data of the command that the first argument names."""
    name = wrapped_command("preview", argv, USAGE, PREVIEWED, "a command that reads data")
    if name is not None:
        config, flags = parse_preview(name, argv[1:])
        run_in_main_process(lambda: import_module("openrlhf.inference.preview").run(config, flags))


if __name__ == "__main__":
    main()
