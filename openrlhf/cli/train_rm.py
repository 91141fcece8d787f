"""A reward model from pairs of responses."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_rm", argv)
    if config.run.dry_run:
        return
    raise not_built("train_rm")


if __name__ == "__main__":
    main()
