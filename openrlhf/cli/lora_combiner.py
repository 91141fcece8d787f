"""Merge a LoRA adapter into its base model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("lora_combiner", argv)
    from openrlhf.launch import merge  # torch and transformers are imported only past this line

    with at_work():
        merge.run(config)


if __name__ == "__main__":
    main()
