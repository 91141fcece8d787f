"""Talk to a model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    start("interactive_chat", argv)
    raise not_built("interactive_chat")


if __name__ == "__main__":
    main()
