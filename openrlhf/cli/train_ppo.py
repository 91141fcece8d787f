"""Reinforcement learning in one process: train_ppo_ray without Ray."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_ppo", argv)
    if config.run.dry_run:
        return
    from openrlhf.launch import rl  # torch and transformers are imported only past this line

    rl.run(config)


if __name__ == "__main__":
    main()
