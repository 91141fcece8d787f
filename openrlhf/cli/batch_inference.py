"""Generate, score and post-process over whole datasets."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, start
from openrlhf.cli.signals import at_work


@command
def main(argv: Sequence[str]) -> None:
    config = start("batch_inference", argv)
    from openrlhf.launch import batch_inference  # torch and transformers are imported only past this line

    with at_work():
        batch_inference.run(config)


if __name__ == "__main__":
    main()
