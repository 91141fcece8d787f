"""Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO; single- and multi-turn agents."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_ppo_ray", argv)
    if config.run.dry_run:
        return
    raise not_built("train_ppo_ray")


if __name__ == "__main__":
    main()
