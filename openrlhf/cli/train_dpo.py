"""Direct preference optimisation: DPO, IPO and cDPO."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    config = start("train_dpo", argv)
    if config.run.dry_run:
        return
    raise not_built("train_dpo")


if __name__ == "__main__":
    main()
