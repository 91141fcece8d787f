"""Predict the memory and time of a training command: `openrlhf plan COMMAND [the command's flags] [--gpus 8xH100]`."""

from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.entry import command
from openrlhf.cli.wrapped import run_in_main_process, wrapped_command
from openrlhf.config.plan import PLANNED, parse_plan

USAGE = f"""openrlhf plan COMMAND [the command's flags] [--gpus 8xH100] [--nodes N]

Put `plan` in front of a command line to see before you start whether it fits: memory by model, phase and term, seconds
by phase, and which flags to change. It reads the models' config.json, and neither weights nor data.

Commands: {", ".join(PLANNED)}
"""


@command
def main(argv: Sequence[str]) -> None:
    """Plan the command that the first argument names."""
    name = wrapped_command("plan", argv, USAGE, PLANNED, "a training command")
    if name is not None:
        config, flags = parse_plan(name, argv[1:])
        run_in_main_process(lambda: import_module("openrlhf.training.plan_command").run(name, config, flags))


if __name__ == "__main__":
    main()
