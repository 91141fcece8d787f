"""A process reward model from steps with labels."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_prm", argv)
    if config.run.dry_run:
        return
    raise not_built("train_prm")


if __name__ == "__main__":
    main()
