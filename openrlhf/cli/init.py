"""Write a commented YAML file for a first run of a task."""

from collections.abc import Sequence

from openrlhf.cli.entry import command, make_main

run_init = make_main("init")


@command
def main(argv: Sequence[str]) -> None:
    """Run the command; the task may be given as the first word, without --task."""
    names_task = bool(argv) and not argv[0].startswith("-")
    run_init(["--task", *argv] if names_task else argv)


if __name__ == "__main__":
    main()
