"""Supervised fine-tuning, and continued pre-training with --pretrain_mode."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_sft", argv)
    if config.run.dry_run:
        return
    raise not_built("train_sft")


if __name__ == "__main__":
    main()
