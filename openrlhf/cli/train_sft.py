"""Supervised fine-tuning, and continued pre-training with --pretrain_mode."""

from openrlhf.cli.entry import make_main

main = make_main("train_sft")

if __name__ == "__main__":
    main()
