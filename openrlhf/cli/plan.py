"""Predict the memory and time of a training command: `openrlhf plan COMMAND [the command's flags] [--gpus 8xH100]`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from openrlhf.cli.entry import command
from openrlhf.config.plan import PLANNED, parse_plan
from openrlhf.config.suggestions import suggest_commands
from openrlhf.errors import ConfigError
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
    name = argv[0].replace("-", "_")
    if name not in PLANNED:
        near = [line for line in suggest_commands(argv, PLANNED) if line.split()[0] in PLANNED]
        fix = " or ".join(f"openrlhf plan {line}" for line in near) or " or ".join(PLANNED)
        raise ConfigError(f"plan: expected a training command, got {argv[0]}", try_this=fix)
    config, flags = parse_plan(name, argv[1:])
    if is_main_process():  # a launcher's other processes would print the same
        with interrupt_on_signals():
            import_module("openrlhf.training.plan_command").run(name, config, flags)


if __name__ == "__main__":
    main()
