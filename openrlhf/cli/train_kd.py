"""Knowledge distillation from a teacher model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_kd", argv)
    if config.run.dry_run:
        return
    raise not_built("train_kd")


if __name__ == "__main__":
    main()
