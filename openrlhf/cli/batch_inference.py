"""Generate, score and post-process over whole datasets."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, not_built, start


@command
def main(argv: Sequence[str]) -> None:
    start("batch_inference", argv)
    raise not_built("batch_inference")


if __name__ == "__main__":
    main()
