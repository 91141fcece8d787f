"""Reinforcement learning in one process: train_ppo_ray without Ray."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_ppo", argv)
    if config.run.dry_run:
        return
    raise not_built("train_ppo")


if __name__ == "__main__":
    main()
