"""Merge a LoRA adapter into its base model."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("lora_combiner", argv)
    from openrlhf.launch import merge  # torch and transformers are imported only past this line

    merge.run(config)


if __name__ == "__main__":
    main()
