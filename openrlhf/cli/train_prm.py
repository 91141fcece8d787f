"""A process reward model from steps with labels."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_prm", argv)
    from openrlhf.launch import supervised, trial  # torch and transformers are imported only past this line

    with at_work():
        if config.run.dry_run:
            trial.dry_run(config)
        else:
            supervised.run(config)


if __name__ == "__main__":
    main()
