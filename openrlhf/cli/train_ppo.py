"""Reinforcement learning in one process without Ray; under deepspeed or torchrun, on one device per process."""

from openrlhf.cli.entry import make_main

main = make_main("train_ppo")

if __name__ == "__main__":
    main()
