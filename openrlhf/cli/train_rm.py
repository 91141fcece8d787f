"""Train a reward model on pairs of responses."""

from openrlhf.cli.entry import make_main

main = make_main("train_rm")

if __name__ == "__main__":
    main()
