"""Talk to a model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("interactive_chat", argv)
    from openrlhf.launch import chat  # torch and transformers are imported only past this line

    with at_work():
        chat.run(config)


if __name__ == "__main__":
    main()
