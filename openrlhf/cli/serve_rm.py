"""Serve a reward model over HTTP."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    start("serve_rm", argv)
    raise not_built("serve_rm")


if __name__ == "__main__":
    main()
