"""Predict the memory and time of a training command: `openrlhf plan COMMAND [the command's flags] [--gpus 8xH100]`."""

from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.wrapped import make_wrapper
from openrlhf.config.plan import PLANNED, parse_plan

USAGE = """openrlhf plan COMMAND [the command's flags] [--gpus 8xH100] [--nodes N]

Put `plan` in front of a command line to see before you start whether it fits: memory by model, phase and term, seconds
by phase, and which flags to change. It reads the models' config.json, and neither weights nor data.
"""


def run(name: str, argv: Sequence[str]) -> None:
    config, flags = parse_plan(name, argv)
    import_module("openrlhf.training.plan_command").run(name, config, flags)


main = make_wrapper("plan", USAGE, PLANNED, "a training command", run)

if __name__ == "__main__":
    main()
