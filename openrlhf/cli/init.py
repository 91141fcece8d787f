"""Write a commented YAML file for a first run of a task."""

from collections.abc import Sequence
from typing import get_args

from openrlhf.cli.entry import command, make_main
from openrlhf.config.sections.setup import Task

run_init = make_main("init")


@command
def main(argv: Sequence[str]) -> None:
    """Run the command; the task may be given without --task, before or after the flags."""
    for place, word in enumerate(argv):
        if word in get_args(Task) and (place == 0 or argv[place - 1] not in ("--task", "--output")):
            argv = ["--task", word, *argv[:place], *argv[place + 1 :]]
            break
    run_init(argv)


if __name__ == "__main__":
    main()
