"""Show the data of a command as its model would see it: `openrlhf preview COMMAND [the command's flags]`."""

from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.wrapped import make_wrapper
from openrlhf.config.preview import PREVIEWED, parse_preview

USAGE = """openrlhf preview COMMAND [the command's flags] [--rows N]

Put `preview` in front of a command line to see its data before you train: rendered rows with the trained text marked,
lengths, totals and warnings. It loads the tokenizer and the data, but no model.
"""


def run(name: str, argv: Sequence[str]) -> None:
    config, flags = parse_preview(name, argv)
    import_module("openrlhf.inference.preview").run(config, flags)


main = make_wrapper("preview", USAGE, PREVIEWED, "a command that reads data", run)

if __name__ == "__main__":
    main()
