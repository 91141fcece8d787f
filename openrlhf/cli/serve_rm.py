"""Serve a reward model over HTTP."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("serve_rm", argv)
    from openrlhf.launch import serve  # torch, transformers and fastapi are imported only past this line

    with at_work():
        serve.run(config)


if __name__ == "__main__":
    main()
