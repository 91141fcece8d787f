"""Train a process reward model on labelled steps."""

from openrlhf.cli.entry import make_main

main = make_main("train_prm")

if __name__ == "__main__":
    main()
