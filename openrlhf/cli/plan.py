"""Predict the memory and time of a training command: `openrlhf plan COMMAND [the command's flags] [--gpus 8xH100]`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.entry import command
from openrlhf.cli.wrapped import wrapped_command
from openrlhf.config.plan import PLANNED, parse_plan
from openrlhf.monitor import is_main_process
from openrlhf.signals import interrupt_on_signals

USAGE = f"""openrlhf plan COMMAND [the command's flags] [--gpus 8xH100] [--nodes N]

Put `plan` in front of a command line to see before you start whether it fits: memory by model, phase and term, seconds
by phase, and which flags to change. It reads the models' config.json, and neither weights nor data.

Commands: {", ".join(PLANNED)}
"""


@command
def main(argv: Sequence[str]) -> None:
    """Plan the command that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    name = wrapped_command("plan", argv, PLANNED, "a training command")
    config, flags = parse_plan(name, argv[1:])
    if is_main_process():  # a launcher's other processes would print the same
        with interrupt_on_signals():
            import_module("openrlhf.training.plan_command").run(name, config, flags)


if __name__ == "__main__":
    main()
