"""Merge a LoRA adapter into its base model."""

from openrlhf.cli.entry import make_main

main = make_main("lora_combiner")

if __name__ == "__main__":
    main()
