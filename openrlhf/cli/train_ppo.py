"""Reinforcement learning in one process without Ray; under deepspeed or torchrun, on one device per process."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_ppo", argv)
    from openrlhf.launch import rl, trial  # torch and transformers are imported only past this line

    with at_work():
        if config.run.dry_run:
            trial.dry_run(config)
        else:
            rl.run(config)


if __name__ == "__main__":
    main()
