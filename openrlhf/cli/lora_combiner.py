"""Merge a LoRA adapter into its base model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    start("lora_combiner", argv)
    raise not_built("lora_combiner")


if __name__ == "__main__":
    main()
