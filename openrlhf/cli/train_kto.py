"""Preference learning from single responses with a label (KTO)."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_kto", argv)
    if config.run.dry_run:
        return
    raise not_built("train_kto")


if __name__ == "__main__":
    main()
