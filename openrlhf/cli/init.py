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
        is_value = place > 0 and argv[place - 1] in ("--task", "--output")
        if not is_value and (word in get_args(Task) or (place == 0 and not word.startswith("-"))):
            argv = ["--task", word, *argv[:place], *argv[place + 1 :]]
            break
    run_init(argv)


if __name__ == "__main__":
    main()
