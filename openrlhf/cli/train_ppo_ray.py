"""Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO; single- and multi-turn agents."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_ppo_ray", argv)
    from openrlhf.launch import rl, trial  # torch and transformers are imported only past this line

    with at_work():
        if config.run.dry_run:
            trial.dry_run(config)
        else:
            rl.run(config)


if __name__ == "__main__":
    main()
