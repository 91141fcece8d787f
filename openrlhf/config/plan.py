"""Flags of `openrlhf plan COMMAND`: those of the command, and a few that describe the machine."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass

from openrlhf.config.check import check_sizes
from openrlhf.config.checks.common import numbers_are_in_range
from openrlhf.config.commands import COMMANDS, TrainingConfig
from openrlhf.config.flags import POSITIVE, flag, section
from openrlhf.config.parser import parse

PLANNED: dict[str, type[TrainingConfig]] = {
    name: config for name, config in COMMANDS.items() if issubclass(config, TrainingConfig)
}


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Plan"""

    gpus: str | None = flag(
        None, "GPUs of a node, such as 8xH100 or A100-40 (default: those of this machine).", essential=True
    )
    nodes: int = flag(1, "Number of nodes.", POSITIVE, essential=True)
    host_memory: float | None = flag(None, "Host memory of a node in GiB (default with --gpus: unknown).", POSITIVE)
    network: float = flag(400.0, "Speed of a node's network in Gbit/s.", POSITIVE)
    json: bool = flag(False, "Print the plan as JSON; sizes are in bytes.", essential=True)


def parse_plan(name: str, argv: Sequence[str]) -> tuple[TrainingConfig, PlanFlags]:
    """Parse and check the flags of `openrlhf plan NAME`; return the command's config and the plan's flags."""
    command = PLANNED[name]
    config = parse(with_plan_flags(command), argv, prog=f"openrlhf plan {name}")
    numbers_are_in_range(config)
    own = command(**{part.name: getattr(config, part.name) for part in fields(command)})
    return check_sizes(own), config.plan


def with_plan_flags(command: type[TrainingConfig]) -> type:
    """Return a copy of a command's config with one more section."""
    return make_dataclass(
        command.__name__,
        [("plan", PlanFlags, section(PlanFlags))],
        bases=(command,),
        namespace={"__doc__": "Predict the memory and time of this command, from its flags and config.json alone."},
        frozen=True,
        kw_only=True,
    )
